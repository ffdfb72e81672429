"""How does a bucket travel?"""
