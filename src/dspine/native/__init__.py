"""C++ sources of the CPU kernels; `dspine.kernels` compiles and loads them."""
