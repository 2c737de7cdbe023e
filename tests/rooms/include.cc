// Compiled with one room's include directories; TESSERA_INCLUDED is the header, in quotes.
#include TESSERA_INCLUDED
