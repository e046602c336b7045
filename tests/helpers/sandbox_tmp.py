"""Code that lists a program's /tmp without its interpreter, which is there if the tests run from a folder in /tmp."""

OWN_TMP = "[n for n in __import__('os').listdir('/tmp') if not __import__('sys').prefix.startswith(f'/tmp/{n}/')]"
