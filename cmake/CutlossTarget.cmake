# How every target of ours is compiled. Options go on targets, never on the directory, so that a project which adds
# this one keeps its own flags; and never -march=native: kernels choose their instruction set at run time.
function(cutloss_target target)
  set_target_properties(${target} PROPERTIES CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF)
  if(NOT BUILD_SHARED_LIBS)
    set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  endif()
  if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wnon-virtual-dtor $<$<CONFIG:Release>:-O2>)
    if(CUTLOSS_WERROR)
      target_compile_options(${target} PRIVATE -Werror)
    endif()
    if(CUTLOSS_SANITIZE)
      target_compile_options(${target} PRIVATE -fsanitize=${CUTLOSS_SANITIZE} -fno-omit-frame-pointer
                             -fno-sanitize-recover=all)
      # PUBLIC, since a static library is linked by others.
      target_link_options(${target} PUBLIC -fsanitize=${CUTLOSS_SANITIZE})
    endif()
  endif()
endfunction()
