# cmake -DSOURCE=folder -DOUTPUT=header -P revision.cmake: the git revision of the tree as a C++ header, which is written
# only where it changed. Empty outside a git checkout.
set(revision "")
find_program(GIT git)
if(GIT)
  execute_process(COMMAND ${GIT} -C ${SOURCE} rev-parse --short=12 HEAD OUTPUT_VARIABLE commit RESULT_VARIABLE failed
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT failed)
    execute_process(COMMAND ${GIT} -C ${SOURCE} diff-index --quiet HEAD -- RESULT_VARIABLE changed ERROR_QUIET)
    set(revision ${commit})
    if(changed)
      string(APPEND revision "+")
    endif()
  endif()
endif()
file(WRITE ${OUTPUT}.new
  "#pragma once\n\nnamespace dropkv::eval {\n\ninline constexpr const char* kGitRevision = \"${revision}\";\n\n}\n")
execute_process(COMMAND ${CMAKE_COMMAND} -E copy_if_different ${OUTPUT}.new ${OUTPUT})
