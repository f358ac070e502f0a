# CMake package of an installed flashverify wheel.
#
#   find_package(flashverify 4 REQUIRED PATHS <python -m flashverify --cmake-dir>)
#   target_link_libraries(program PRIVATE flashverify::flashverify)
#
# The library's folder is put on the program's run path by CMake, as for any
# library outside the system's folders; libtbb.so.12 is found beside it.

get_filename_component(_flashverify_package "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)

if(NOT TARGET flashverify::flashverify)
  add_library(flashverify::flashverify SHARED IMPORTED)
  set_target_properties(flashverify::flashverify PROPERTIES
    IMPORTED_LOCATION "${_flashverify_package}/libflashverify.so.4"
    IMPORTED_SONAME "libflashverify.so.4"
    INTERFACE_INCLUDE_DIRECTORIES "${_flashverify_package}/include")
endif()

foreach(_flashverify_file libflashverify.so.4 libtbb.so.12 include/flashverify/flashverify.h)
  if(NOT EXISTS "${_flashverify_package}/${_flashverify_file}")
    set(flashverify_FOUND FALSE)
    set(flashverify_NOT_FOUND_MESSAGE "${_flashverify_package}/${_flashverify_file} is missing")
  endif()
endforeach()

unset(_flashverify_file)
unset(_flashverify_package)
