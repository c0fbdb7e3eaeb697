# Read after the project of llama-cpp-python: it always asks for llama.cpp's library of helpers for
# its programs, which takes as long to compile as the library itself. Only mtmd's programs use it.
if(NOT LLAVA_BUILD)
    set(LLAMA_BUILD_COMMON OFF)
endif()
