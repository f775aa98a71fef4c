"""GEMMs of Hopper in Gluon, whose warps either copy or multiply. The names are those of the usual kernels in the folder above."""
