"""The CPU's kernels in C++: products on packed blocks, attention, whole passes. Built where a compiler is at hand."""
