"""What a machine has and what runs on it: profiles, storage, containers, local Ray, processes, memory."""
