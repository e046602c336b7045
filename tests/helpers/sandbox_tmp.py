"""Code that lists /tmp of a program, except for its interpreter, which is below /tmp if the tests run from a folder there."""

OWN_TMP = "[n for n in __import__('os').listdir('/tmp') if not __import__('sys').prefix.startswith(f'/tmp/{n}/')]"
