"""What way does a bucket take?"""
