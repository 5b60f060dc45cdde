# dropkv_internal: what code inside this tree links instead of dropkv. It sees the headers under src/ and the symbols
# that a shared libdropkv hides.
function(dropkv_internal_target)
  add_library(dropkv_internal INTERFACE)
  target_include_directories(dropkv_internal INTERFACE ${PROJECT_SOURCE_DIR}/src)
  get_target_property(type dropkv TYPE)
  if(type STREQUAL "SHARED_LIBRARY")
    add_library(dropkv_archive STATIC $<TARGET_OBJECTS:dropkv>)
    set_target_properties(dropkv_archive PROPERTIES LINKER_LANGUAGE CXX)
    target_include_directories(dropkv_archive PUBLIC ${PROJECT_SOURCE_DIR}/include)
    target_compile_features(dropkv_archive PUBLIC cxx_std_20)
    find_package(Threads REQUIRED)
    find_package(hwy REQUIRED)
    target_link_libraries(dropkv_archive PUBLIC Threads::Threads PRIVATE hwy::hwy)
    target_link_libraries(dropkv_internal INTERFACE dropkv_archive)
  else()
    target_link_libraries(dropkv_internal INTERFACE dropkv)
  endif()
endfunction()

# dropkv_add_test(NAME name LABELS label ... COMMAND command ...): add_test with the build's prefix and the settings
# that every test shares. Passive waiting: ggml's OpenMP threads otherwise spin against whatever else runs.
function(dropkv_add_test)
  cmake_parse_arguments(arg "" "NAME" "COMMAND;LABELS" ${ARGN})
  set(name ${DROPKV_TEST_PREFIX}${arg_NAME})
  add_test(NAME ${name} COMMAND ${arg_COMMAND})
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT 900
    ENVIRONMENT "UBSAN_OPTIONS=print_stacktrace=1;TSAN_OPTIONS=halt_on_error=1;PYTHONDONTWRITEBYTECODE=1;OMP_WAIT_POLICY=passive")
endfunction()

# dropkv_test(NAME name SOURCES a.cc ... [LIBS lib ...] [LABELS label ...]): a GoogleTest program known to ctest.
function(dropkv_test)
  cmake_parse_arguments(arg "" "NAME" "SOURCES;LIBS;LABELS" ${ARGN})
  if(NOT DROPKV_BUILD_TESTS)
    return()
  endif()
  find_package(GTest REQUIRED)
  add_executable(${arg_NAME} ${arg_SOURCES})
  target_include_directories(${arg_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${arg_NAME} PRIVATE dropkv_internal dropkv_flags ${arg_LIBS} GTest::gtest_main)
  # GoogleTest's macros end in an if with else, and name a parameter "info" that a lambda's own then shadows.
  set_source_files_properties(${arg_SOURCES} PROPERTIES COMPILE_OPTIONS "-Wno-dangling-else;-Wno-shadow")
  dropkv_add_test(NAME ${arg_NAME} COMMAND ${arg_NAME} LABELS ${arg_LABELS})
endfunction()

# dropkv_bench(NAME name SOURCES a.cc ... [LIBS lib ...]): a Google Benchmark program, in the build's bench folder.
function(dropkv_bench)
  cmake_parse_arguments(arg "" "NAME" "SOURCES;LIBS" ${ARGN})
  if(NOT DROPKV_BUILD_BENCH)
    return()
  endif()
  find_package(benchmark REQUIRED)
  add_executable(${arg_NAME} ${arg_SOURCES})
  set_target_properties(${arg_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bench)
  target_link_libraries(${arg_NAME} PRIVATE dropkv_internal dropkv_flags ${arg_LIBS} benchmark::benchmark_main)
endfunction()

# dropkv_command_line(target): the program `dropkv`, at the root of the build folder.
function(dropkv_command_line target)
  set_target_properties(${target} PROPERTIES OUTPUT_NAME dropkv RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
endfunction()
