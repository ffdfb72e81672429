"""Elastic jobs in simulated time: clocks, threads, sockets and a store that a test plays as it likes."""
