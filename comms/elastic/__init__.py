"""Elastic training: continues without failed ranks and admits new ones, without a restart of the job."""
