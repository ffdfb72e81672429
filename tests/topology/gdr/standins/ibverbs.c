/* libibverbs: the calls of the registration probe, for up to two devices, as strict as library and kernel together.

   STANDIN may set `devices` (1) and `active_mtu` (5, which is 4096 bytes) besides the errno of a call.
   OLD  rdma-core before 25: neither ibv_reg_dmabuf_mr nor ibv_reg_mr_iova2
   Source: infiniband/verbs.h of rdma-core 44; ibv_reg_mr(3), ibv_get_device_list(3), ibv_alloc_pd(3), ibv_query_port(3). */
#define _GNU_SOURCE
#include "standin.h"
#include <pthread.h>
#ifdef HEADERS
#include <infiniband/verbs.h>
#undef ibv_reg_mr
#undef ibv_query_port
#undef ibv_get_device_list
#else
enum { IBV_ACCESS_LOCAL_WRITE = 1, IBV_ACCESS_REMOTE_WRITE = 2, IBV_ACCESS_REMOTE_READ = 4, IBV_ACCESS_REMOTE_ATOMIC = 8 };
enum { IBV_ACCESS_RELAXED_ORDERING = 1 << 20, IBV_PORT_ACTIVE = 4, IBV_MTU_4096 = 5 };
struct ibv_device {
  struct { void *unused[2]; } _ops;
  int node_type, transport_type;
  char name[64], dev_name[64], dev_path[256], ibdev_path[256];
};
struct ibv_context { struct ibv_device *device; struct { void *unused[32]; } ops; int cmd_fd, async_fd, num_comp_vectors; };
struct ibv_pd { struct ibv_context *context; uint32_t handle; };
struct ibv_mr { struct ibv_context *context; struct ibv_pd *pd; void *addr; size_t length; uint32_t handle, lkey, rkey; };
struct ibv_port_attr {
  int state, max_mtu, active_mtu, gid_tbl_len;
  uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
  uint16_t pkey_tbl_len, lid, sm_lid;
  uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state, link_layer, flags;
  uint16_t port_cap_flags2;
};
struct _compat_ibv_port_attr;
#endif
#define LIBRARY "libibverbs"

static struct ibv_device devices[2] = {{.name = "mlx5_0"}, {.name = "mlx5_1"}};
static struct ibv_device *list[3] = {&devices[0], &devices[1], NULL};
static struct ibv_context context;
static struct ibv_pd domain;
static struct ibv_mr region;
static int listed, opened, domains, regions;

__attribute__((destructor)) static void at_exit(void) { report(LIBRARY, "kept", listed + opened + domains + regions); }

/* Whether the call is planned to fail; then errno is set, as the library does. */
static int refused(const char *call) {
  int code = planned(call, 0);
  if (code) errno = code;
  return code;
}

struct ibv_device **ibv_get_device_list(int *count) {
  if (refused("ibv_get_device_list")) return NULL;
  listed++;
  list[planned("devices", 1)] = NULL;
  if (count) *count = planned("devices", 1);
  return list;
}
void ibv_free_device_list(struct ibv_device **given) { listed -= !wrong(LIBRARY, "a list freed that was not given", given != list || !listed); }
const char *ibv_get_device_name(struct ibv_device *device) {
  wrong(LIBRARY, "a device named after its list was freed", !listed);
  return device->name;
}
struct ibv_context *ibv_open_device(struct ibv_device *device) {
  if (wrong(LIBRARY, "a device opened after its list was freed", !listed) || refused("ibv_open_device")) return NULL;
  opened++;
  context.device = device;
  return &context;
}
int ibv_close_device(struct ibv_context *given) {
  if (wrong(LIBRARY, "a device closed with domains in it", domains) || given != &context) return -1;
  opened--;
  return 0;
}
int ibv_query_port(struct ibv_context *given, uint8_t port, struct _compat_ibv_port_attr *attributes) {
  if (wrong(LIBRARY, "ports are counted from 1", port != 1)) return EINVAL;
  int code = planned("ibv_query_port", 0);
  if (code) return code;
  struct ibv_port_attr found = {.state = IBV_PORT_ACTIVE, .max_mtu = IBV_MTU_4096, .active_mtu = planned("active_mtu", IBV_MTU_4096)};
  memcpy(attributes, &found, sizeof found);
  return 0;
}
struct ibv_pd *ibv_alloc_pd(struct ibv_context *given) {
  if (wrong(LIBRARY, "a domain of no open device", given != &context || !opened) || refused("ibv_alloc_pd")) return NULL;
  domains++;
  domain.context = given;
  return &domain;
}
int ibv_dealloc_pd(struct ibv_pd *given) {
  if (wrong(LIBRARY, "a domain given back with regions in it", regions) || given != &domain) return EBUSY;
  domains--;
  return 0;
}

/* Returns the region if the kernel would take it: remote writes need local ones, unknown flags are refused. */
static struct ibv_mr *taken(const char *call, struct ibv_pd *given, size_t length, int access) {
  int known = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
              IBV_ACCESS_RELAXED_ORDERING;
  int remote = access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
  if (wrong(LIBRARY, "access flags", access & ~known || (remote && !(access & IBV_ACCESS_LOCAL_WRITE))) ||
      wrong(LIBRARY, "no domain", given != &domain || !domains) || wrong(LIBRARY, "no bytes", !length)) {
    errno = EINVAL;
    return NULL;
  }
  if (refused(call)) return NULL;
  regions++;
  return &region;
}
struct ibv_mr *ibv_reg_mr(struct ibv_pd *given, void *address, size_t length, int access) {
  wrong(LIBRARY, "no address", !address);
  return taken("ibv_reg_mr", given, length, access);
}
int ibv_dereg_mr(struct ibv_mr *given) {
  if (wrong(LIBRARY, "a region given back that was not given", given != &region || !regions)) return EINVAL;
  regions--;
  return 0;
}
#ifndef OLD
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *given, void *address, size_t length, uint64_t iova, unsigned int access) {
  return taken("ibv_reg_mr_iova2", given, length, (int)access);
}
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *given, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  off_t nbytes = lseek(fd, 0, SEEK_END); /* the length of a dma-buf, which is how user space asks for it */
  if (wrong(LIBRARY, "no dma-buf", nbytes <= 0) || wrong(LIBRARY, "range beyond the dma-buf", offset + length > (uint64_t)nbytes) ||
      wrong(LIBRARY, "offset and iova differ within a page", (offset ^ iova) % page_nbytes() != 0)) {
    errno = EINVAL;
    return NULL;
  }
  return taken("ibv_reg_dmabuf_mr", given, length, access);
}
#endif
