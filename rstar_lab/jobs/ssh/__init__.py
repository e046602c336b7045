"""Jobs on another machine, reached with ssh. On that host, the job runs with the backend local, ray or slurm. Its log
and its exit code are copied to this machine whenever its status is read, and its runs by `mirror`. The host needs the
package's dependencies, and no open port other than sshd's.
"""
