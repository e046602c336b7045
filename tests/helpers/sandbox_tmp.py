"""What a program finds in its /tmp, its interpreter left out: that lies there where the tests run from a folder in /tmp."""

OWN_TMP = "[n for n in __import__('os').listdir('/tmp') if not __import__('sys').prefix.startswith(f'/tmp/{n}/')]"
