# cmake -DROOT=folder -DOUTPUT=file.cc -DFILES=a,b,c -P embed.cmake
# Writes a C++ file that holds each file's path below ROOT and its text, without indentation and lines of comment, which are a
# third of it; the numbers of lines stay.
string(REPLACE "," ";" files "${FILES}")
set(code "// Generated from kernels/ by cmake/embed.cmake.\n#include \"jit/sources.h\"\n\nnamespace tessera::jit {\n\n")
string(APPEND code "const std::vector<Source>& embedded_sources() {\n  static const std::vector<Source> sources = {\n")
foreach(file IN LISTS files)
  file(READ ${ROOT}/${file} text)
  if(text MATCHES "\\)tessera\"")
    message(FATAL_ERROR "${file} holds the characters that end its own literal")
  endif()
  string(REGEX REPLACE "\n *//[^\n]*" "\n" text "\n${text}")
  string(REGEX REPLACE "\n +" "\n" text "${text}")
  string(SUBSTRING "${text}" 1 -1 text)
  string(APPEND code "      {\"${file}\", R\"tessera(${text})tessera\"},\n")
endforeach()
string(APPEND code "  };\n  return sources;\n}\n\n}  // namespace tessera::jit\n")
file(WRITE ${OUTPUT} "${code}")
