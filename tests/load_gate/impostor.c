/* A foreign library that happens to export fv_get_api.
 *
 * IMPOSTOR_ABI_VERSION and IMPOSTOR_TABLE_BYTES give its table's head; with
 * IMPOSTOR_NO_TABLE it returns none. Its build id is no address: whoever follows
 * it without having looked at the layout crashes. */
#include <stddef.h>
#include <stdint.h>

struct head {
  uint32_t struct_size;
  uint32_t abi_version;
  uint32_t precision_revision;
  uint32_t reserved;
  const char* build_id;
};

const struct head* fv_get_api(void);

const struct head* fv_get_api(void) {
#ifdef IMPOSTOR_NO_TABLE
  return NULL;
#else
  static struct head head;
  head.struct_size = IMPOSTOR_TABLE_BYTES;
  head.abi_version = IMPOSTOR_ABI_VERSION;
  head.precision_revision = 4;
  head.build_id = (const char*)(uintptr_t)8;
  return &head;
#endif
}
