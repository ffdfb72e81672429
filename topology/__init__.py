"""What do the machines look like?"""
