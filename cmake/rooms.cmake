# Rooms: static libraries whose includes point one way.
#
# tessera_room(NAME [OBJECT] SOURCES ... [USES room...]): the library tessera_NAME. Its headers are included as
# "NAME/header.h", through an include root that holds this room alone; who uses the room gets that root, and with it
# those of the rooms it uses. A header of any other room is not found.
function(tessera_room NAME)
  cmake_parse_arguments(R "OBJECT" "" "SOURCES;USES" ${ARGN})
  set(root ${CMAKE_BINARY_DIR}/rooms/${NAME})
  file(MAKE_DIRECTORY ${root})
  file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR} ${root}/${NAME} SYMBOLIC)
  if(R_OBJECT)
    add_library(tessera_${NAME} OBJECT ${R_SOURCES})
  else()
    add_library(tessera_${NAME} STATIC ${R_SOURCES})
    set_target_properties(tessera_${NAME} PROPERTIES LINKER_LANGUAGE CXX)  # SOURCES may be objects
  endif()
  target_include_directories(tessera_${NAME} PUBLIC ${root})
  foreach(room IN LISTS R_USES)
    target_link_libraries(tessera_${NAME} PUBLIC tessera_${room})
    set_property(GLOBAL APPEND PROPERTY TESSERA_ROOM_USES "${NAME} --> ${room}")
  endforeach()
endfunction()

# tessera_compiled(VARIABLE TARGET): with sanitizers, which check src/ alone, the sources of TARGET become the objects that
# the plain build has made of them.
function(tessera_compiled VARIABLE TARGET)
  if(TESSERA_SANITIZE)
    file(RELATIVE_PATH folder ${CMAKE_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
    list(TRANSFORM ${VARIABLE} REPLACE "(.+)" "${TESSERA_PLAIN}/${folder}/CMakeFiles/${TARGET}.dir/\\1.o")
    set(${VARIABLE} ${${VARIABLE}} PARENT_SCOPE)
  endif()
endfunction()

# tessera_checked_first(TARGET LIBRARIES...): with sanitizers, the rooms of src/ among LIBRARIES, and those they use, are linked
# whole and before the objects of TARGET: the linker keeps the first copy of an inline function, and theirs is checked.
function(tessera_checked_first TARGET)
  set(archives)
  set(seen)
  set(libraries ${ARGN})
  while(TESSERA_SANITIZE AND libraries)
    list(POP_FRONT libraries library)
    if(NOT TARGET ${library} OR library IN_LIST seen)
      continue()
    endif()
    list(APPEND seen ${library})
    get_target_property(type ${library} TYPE)
    get_target_property(folder ${library} SOURCE_DIR)
    get_target_property(used ${library} INTERFACE_LINK_LIBRARIES)
    list(APPEND libraries ${used})
    if(type STREQUAL STATIC_LIBRARY AND folder MATCHES "^${CMAKE_SOURCE_DIR}/src/")
      list(APPEND archives $<TARGET_FILE:${library}>)
    endif()
  endwhile()
  if(archives)
    target_link_options(${TARGET} PRIVATE -Wl,--whole-archive ${archives} -Wl,--no-whole-archive)
  endif()
endfunction()

# TESSERA_FAMILIES: the rooms below src/ that have a family.cc. A new folder of that kind is found by itself.
file(GLOB TESSERA_FAMILIES CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/src/*/family.cc)
list(TRANSFORM TESSERA_FAMILIES REPLACE "/family.cc$" "")
