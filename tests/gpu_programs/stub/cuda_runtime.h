// The little of the CUDA runtime that common/ranks.cuh and common/main.cu use, for a machine without CUDA.
#pragma once
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
