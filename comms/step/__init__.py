"""What is one training step, for all that goes on in it?"""
