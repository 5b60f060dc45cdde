# Installs BUILD, moves the prefix (a package must not know where it was made), and builds and runs the consumers.
file(REMOVE_RECURSE ${WORK})
macro(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endmacro()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/first)
file(RENAME ${WORK}/first ${WORK}/prefix)

# find_package, C and C++
run(${CMAKE_COMMAND} -S ${CONSUMER} -B ${WORK}/build -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${WORK}/prefix
  -DCMAKE_C_COMPILER=${CC} -DCMAKE_CXX_COMPILER=${CXX} -DWANTED_VERSION=${VERSION})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer_cxx)
run(${WORK}/build/consumer_c)

# pkg-config, C
if(NOT PKG_CONFIG)
  message(FATAL_ERROR "pkg-config is missing")
endif()
set(ENV{PKG_CONFIG_PATH} ${WORK}/prefix/${LIBDIR}/pkgconfig)
execute_process(COMMAND ${PKG_CONFIG} --cflags --libs dropkv OUTPUT_VARIABLE flags COMMAND_ERROR_IS_FATAL ANY
  OUTPUT_STRIP_TRAILING_WHITESPACE)
separate_arguments(flags UNIX_COMMAND "${flags}")
run(${CC} -std=c11 -Wall -Wextra -Werror ${CONSUMER}/consumer.c -o ${WORK}/consumer_pkg_config ${flags}
  -Wl,-rpath,${WORK}/prefix/${LIBDIR})
run(${WORK}/consumer_pkg_config)

# The command line, where it was built.
if(EXISTS ${WORK}/prefix/bin/dropkv)
  run(${WORK}/prefix/bin/dropkv --version)
endif()
