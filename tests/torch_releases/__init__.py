"""Commands about releases of torch: run the suite on others, and compare what gradwire uses of their private parts."""
