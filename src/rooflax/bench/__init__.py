"""Measuring: workloads, trials, the roofline, ablations, comparisons, reports."""
