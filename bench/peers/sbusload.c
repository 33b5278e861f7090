/* sbusload: protocol-level load generator for any sbus server.
 *
 * usage: sbusload SOCKET SCENARIO [N] [SIZE] [ARG]
 *   pipe     1 publisher -> 1 subscriber
 *   fan      1 publisher -> ARG subscribers (16)
 *   mesh     ARG publishers -> ARG subscribers, a key each (4)
 *   table    1 -> 1 beside ARG foreign patterns held by 100 idle clients
 * (10000) pingpong round trip time, one client that hears its own key hot like
 * fan, but ARG distinct keys in turn, 1 subscriber with 'k/' SOCKET is a path,
 * or @HEX for an abstract name of exactly those bytes. Every subscriber asks
 * for blocking/soft/block, so nothing may be lost: a lost or reordered message
 * fails the run.  Prints one line of figures.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static struct sockaddr_un addr;
static socklen_t addrlen;
static long n_msgs;
static size_t size;

static void die(const char *what) {
  perror(what);
  exit(1);
}
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static int dial(void) {
  int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0), v = 212992;
  if (fd < 0 || connect(fd, (void *)&addr, addrlen))
    die("connect");
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &v, sizeof v);
  return fd;
}
static void put(int fd, const char *s) {
  if (send(fd, s, strlen(s), MSG_NOSIGNAL) < 0)
    die("send");
}

/* a subscriber knows that its SUB took effect once whoami, sent after it, is
 * answered */
static void sync_(int fd) {
  char b[1024];
  put(fd, "CMSG !/cred/whoami");
  if (recv(fd, b, sizeof b, 0) <= 0)
    die("whoami");
}
struct task {
  int fd;
  int id;
  long expect;
  double done;
};

static void *subscriber(void *p) {
  struct task *t = p;
  char *b = malloc(size + 256);
  uint64_t next = 0, seq;
  for (long i = 0; i < t->expect; i++) {
    ssize_t r = recv(t->fd, b, size + 256, 0);
    if (r <= 0)
      die("recv");
    char *z = memchr(b, 0, r);
    if (!z) {
      fprintf(stderr, "bad packet\n");
      exit(1);
    }
    memcpy(&seq, z + 1, 8);
    if (seq != next++) {
      fprintf(stderr, "order: got %lu want %lu\n", seq, next - 1);
      exit(1);
    }
  }
  t->done = now();
  free(b);
  return NULL;
}
static int nkeys = 1;
static void *publisher(void *p) {
  struct task *t = p;
  char *b = calloc(1, size + 256);
  for (uint64_t i = 0; i < (uint64_t)n_msgs; i++) {
    int k = nkeys > 1 ? sprintf(b, "MSG k/%d/%lu", t->id, i % nkeys)
                      : sprintf(b, "MSG k/%d", t->id);
    memcpy(b + k + 1, &i, 8);
    if (send(t->fd, b, k + 1 + size, MSG_NOSIGNAL) < 0)
      die("publish");
  }
  free(b);
  return NULL;
}
static int cmp(const void *a, const void *b) {
  double x = *(double *)a, y = *(double *)b;
  return (x > y) - (x < y);
}

int main(int argc, char **argv) {
  if (argc < 3)
    return 2;
  addr.sun_family = AF_UNIX;
  if (argv[1][0] == '@') {
    size_t n = strlen(argv[1] + 1) / 2;
    for (size_t i = 0; i < n; i++) {
      unsigned v;
      sscanf(argv[1] + 1 + 2 * i, "%2x", &v);
      addr.sun_path[i] = v;
    }
    addrlen = sizeof addr;
  } else {
    strncpy(addr.sun_path, argv[1], sizeof addr.sun_path - 1);
    addrlen = sizeof addr;
  }
  const char *sc = argv[2];
  n_msgs = argc > 3 ? atol(argv[3]) : 100000;
  size = argc > 4 ? atol(argv[4]) : 64;
  long arg = argc > 5               ? atol(argv[5])
             : !strcmp(sc, "fan")   ? 16
             : !strcmp(sc, "mesh")  ? 4
             : !strcmp(sc, "table") ? 10000
             : !strcmp(sc, "hot")   ? 1000
                                    : 1;
  if (size < 8)
    size = 8;
  struct task pub[256], sub[256];
  pthread_t pt[256], st[256];
  int np = 1, ns = 1;
  char s[256];
  if (!strcmp(sc, "pingpong")) {
    int fd = dial();
    char b[4096];
    double *l = malloc(sizeof(double) * n_msgs);
    put(fd, "SUB k/0");
    sync_(fd);
    memset(b, 0, sizeof b);
    int k = sprintf(b, "MSG k/0");
    for (long i = 0; i < n_msgs; i++) {
      double t = now();
      if (send(fd, b, k + 1 + size, 0) < 0)
        die("send");
      char r[4096];
      if (recv(fd, r, sizeof r, 0) <= 0)
        die("recv");
      l[i] = now() - t;
    }
    qsort(l, n_msgs, sizeof *l, cmp);
    printf("pingpong n=%ld p50_us=%.1f p99_us=%.1f p999_us=%.1f\n", n_msgs,
           l[n_msgs / 2] * 1e6, l[n_msgs * 99 / 100] * 1e6,
           l[n_msgs * 999 / 1000] * 1e6);
    return 0;
  }
  if (!strcmp(sc, "fan"))
    ns = arg;
  if (!strcmp(sc, "mesh"))
    np = ns = arg;
  if (!strcmp(sc, "hot"))
    nkeys = arg;
  if (!strcmp(sc, "table")) {
    for (int c = 0; c < 100; c++) {
      int fd = dial();
      for (long i = 0; i < arg / 100; i++) {
        switch (i % 3) {
        case 0:
          sprintf(s, "SUB idle/%d/%ld", c, i);
          break;
        case 1:
          sprintf(s, "SUB idle/%d/*/x%ld", c, i);
          break;
        default:
          sprintf(s, "SUB idle/%d/%ld/", c, i);
          break;
        }
        put(fd, s);
      }
      sync_(fd);
    }
  }
  for (int i = 0; i < ns; i++) {
    sub[i].fd = dial();
    sub[i].id = i;
    sub[i].expect = n_msgs;
    put(sub[i].fd, "CMSG blocking/soft/block");
    put(sub[i].fd, "CMSG order/queue");
    if (!strcmp(sc, "mesh"))
      sprintf(s, "SUB k/%d", i);
    else if (nkeys > 1)
      sprintf(s, "SUB k/");
    else
      sprintf(s, "SUB k/0");
    put(sub[i].fd, s);
    sync_(sub[i].fd);
  }
  for (int i = 0; i < np; i++) {
    pub[i].fd = dial();
    pub[i].id = i;
    put(pub[i].fd, "CMSG echo/on");
    sync_(pub[i].fd);
  }
  double t0 = now();
  for (int i = 0; i < ns; i++)
    pthread_create(&st[i], NULL, subscriber, &sub[i]);
  for (int i = 0; i < np; i++)
    pthread_create(&pt[i], NULL, publisher, &pub[i]);
  double end = 0;
  for (int i = 0; i < np; i++)
    pthread_join(pt[i], NULL);
  for (int i = 0; i < ns; i++) {
    pthread_join(st[i], NULL);
    if (sub[i].done > end)
      end = sub[i].done;
  }
  double dt = end - t0;
  printf("%s n=%ld size=%zu arg=%ld published/s=%.0f delivered/s=%.0f "
         "MB/s=%.1f\n",
         sc, n_msgs, size, arg, n_msgs * np / dt,
         (double)n_msgs * ns * (strcmp(sc, "mesh") ? 1 : 1) / dt,
         (double)n_msgs * ns * size / dt / 1e6);
  return 0;
}
