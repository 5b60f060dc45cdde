# CUDA sources through nvcc by hand: CMake 3.25 does not know that nvcc has C++20. Sets DROPKV_CUDA to ON or OFF.
#
# dropkv_nvcc(out ARCHITECTURES arch ... SOURCES a.cu ...): objects of the sources, position-independent, in list `out`.
if(DROPKV_CUDA STREQUAL "AUTO" OR DROPKV_CUDA)
  find_package(CUDAToolkit 12.8 QUIET)
  if(CUDAToolkit_FOUND)
    set(NVCC ${CUDAToolkit_NVCC_EXECUTABLE})
  elseif(DROPKV_CUDA STREQUAL "AUTO")
    message(STATUS "CUDA: no toolkit (12.8 or newer) found; built without")
    set(DROPKV_CUDA OFF)
  else()
    message(FATAL_ERROR "DROPKV_CUDA is ON, and no CUDA toolkit (12.8 or newer) was found")
  endif()
endif()
if(NOT DROPKV_CUDA)
  return()
endif()
set(DROPKV_CUDA ON)
message(STATUS "CUDA: ${CUDAToolkit_VERSION}, kernels for sm_80, sm_90a and PTX of compute_80")

# Machine code for Ampere and Hopper, and PTX that newer GPUs compile for themselves.
set(DROPKV_ANY_GPU -gencode=arch=compute_80,code=[sm_80,compute_80] -gencode=arch=compute_90a,code=sm_90a)
set(DROPKV_HOPPER -gencode=arch=compute_90a,code=sm_90a)
set(dropkv_nvcc_flags -std=c++20 -O3 --compress-mode=size -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra
    -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src)
if(DROPKV_WERROR)
  list(APPEND dropkv_nvcc_flags -Werror=all-warnings)
endif()

function(dropkv_nvcc out)
  cmake_parse_arguments(arg "" "" "GPUS;SOURCES" ${ARGN})
  set(objects "")
  foreach(source ${arg_SOURCES})
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${source}.o)
    get_filename_component(folder ${object} DIRECTORY)
    file(MAKE_DIRECTORY ${folder})
    add_custom_command(OUTPUT ${object}
      COMMAND ${NVCC} ${dropkv_nvcc_flags} ${arg_GPUS} -MD -MF ${object}.d -MT ${object}
              -c ${CMAKE_CURRENT_SOURCE_DIR}/${source} -o ${object}
      DEPENDS ${source} DEPFILE ${object}.d VERBATIM COMMENT "nvcc ${source}")
    list(APPEND objects ${object})
  endforeach()
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  set(${out} ${objects} PARENT_SCOPE)
endfunction()
