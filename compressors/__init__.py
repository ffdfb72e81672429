"""How do fewer bytes say the same?"""
