# What `cmake --install` lays down: library, headers, find_package(dropkv), pkg-config, and the command line where built.
include(CMakePackageConfigHelpers)

install(TARGETS dropkv EXPORT dropkvTargets)
if(TARGET dropkv_cuda)
  install(TARGETS dropkv_cuda EXPORT dropkvTargets)
endif()
if(TARGET dropkv_cli)
  install(TARGETS dropkv_cli)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/dropkv DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/dropkv)
install(EXPORT dropkvTargets NAMESPACE dropkv:: DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/dropkvConfig.cmake.in
  ${PROJECT_BINARY_DIR}/dropkvConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/dropkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/dropkvConfig.cmake ${PROJECT_BINARY_DIR}/dropkvConfigVersion.cmake
  DESTINATION ${package_dir})

# A C program that links the archive needs what the archive needs; one that links the shared library does not.
set(pc_private "-lhwy -lstdc++ -lm -pthread")
set(pc_public "")
if(NOT BUILD_SHARED_LIBS)
  set(pc_public ${pc_private})
  set(pc_private "")
endif()
file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${CMAKE_CURRENT_LIST_DIR}/dropkv.pc.in ${PROJECT_BINARY_DIR}/dropkv.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/dropkv.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
