/* peerload: the same work as sbusload's pipe, fan and pingpong, for what a
 * user would pick instead: redis and mosquitto over a Unix stream socket, nats
 * over loopback. usage: peerload redis|mqtt|nats PATH_OR_PORT
 * pipe|fan|pingpong N SIZE SUBS One write a message, as sbus has one packet a
 * message; each delivery has a fixed size, so bytes count messages. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
static const char *kind, *where;
static long n;
static size_t size;
static int batch = 1;
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
static void die(const char *w) {
  perror(w);
  exit(1);
}
static int dial(void) {
  int fd;
  if (where[0] == '/') {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    strncpy(a.sun_path, where, 107);
    fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(fd, (void *)&a, sizeof a))
      die("connect");
  } else {
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons(atoi(where))};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (void *)&a, sizeof a))
      die("connect");
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  }
  return fd;
}
static void all(int fd, const void *b, size_t k) {
  const char *p = b;
  while (k) {
    ssize_t r = send(fd, p, k, MSG_NOSIGNAL);
    if (r < 0)
      die("send");
    p += r;
    k -= r;
  }
}
static void some(int fd) {
  char b[4096];
  if (recv(fd, b, sizeof b, 0) <= 0)
    die("recv");
}
static size_t pub_bytes(char *b) {
  char pay[1 << 16];
  memset(pay, 'x', sizeof pay);
  size_t k;
  if (!strcmp(kind, "redis")) {
    k = sprintf(b, "*3\r\n$7\r\nPUBLISH\r\n$3\r\nk/0\r\n$%zu\r\n", size);
    memcpy(b + k, pay, size);
    memcpy(b + k + size, "\r\n", 2);
    return k + size + 2;
  }
  if (!strcmp(kind, "nats")) {
    k = sprintf(b, "PUB k.0 %zu\r\n", size);
    memcpy(b + k, pay, size);
    memcpy(b + k + size, "\r\n", 2);
    return k + size + 2;
  }
  size_t rem = 2 + 3 + size;
  k = 0;
  b[k++] = 0x30;
  do {
    b[k] = rem % 128;
    rem /= 128;
    if (rem)
      b[k] |= 128;
    k++;
  } while (rem);
  b[k++] = 0;
  b[k++] = 3;
  memcpy(b + k, "k/0", 3);
  k += 3;
  memcpy(b + k, pay, size);
  return k + size;
}
static size_t msg_bytes(void) {
  char b[1 << 17];
  if (!strcmp(kind, "redis"))
    return sprintf(b, "*3\r\n$7\r\nmessage\r\n$3\r\nk/0\r\n$%zu\r\n", size) +
           size + 2;
  if (!strcmp(kind, "nats"))
    return sprintf(b, "MSG k.0 1 %zu\r\n", size) + size + 2;
  return pub_bytes(b);
}
static int join(int sub, int id) {
  int fd = dial();
  char b[512];
  size_t k;
  if (!strcmp(kind, "nats")) {
    some(fd);
    {
      const char *h =
          "CONNECT {\"verbose\":false,\"pedantic\":false}\r\nPING\r\n";
      all(fd, h, strlen(h));
      some(fd);
    }
    if (sub) {
      all(fd, "SUB k.0 1\r\nPING\r\n", strlen("SUB k.0 1\r\nPING\r\n"));
      some(fd);
    }
  } else if (!strcmp(kind, "mqtt")) {
    char idt[16];
    int l = sprintf(idt, "c%d", id);
    k = 0;
    b[k++] = 0x10;
    b[k++] = 10 + 2 + l;
    memcpy(b + k, "\0\4MQTT\4\2\0\0", 10);
    k += 10;
    b[k++] = 0;
    b[k++] = l;
    memcpy(b + k, idt, l);
    k += l;
    all(fd, b, k);
    some(fd);
    if (sub) {
      memcpy(b, "\x82\x08\0\1\0\3k/0\0", 10);
      all(fd, b, 10);
      some(fd);
    }
  } else if (sub) {
    all(fd, "SUBSCRIBE k/0\r\n", 15);
    some(fd);
  }
  return fd;
}
struct task {
  int fd;
  double done;
};
static void *reader(void *p) {
  struct task *t = p;
  size_t left = msg_bytes() * n;
  char *b = malloc(1 << 16);
  while (left) {
    ssize_t r = recv(t->fd, b, 1 << 16, 0);
    if (r <= 0)
      die("recv");
    left -= r;
  }
  t->done = now();
  return 0;
}
static void *drain(void *p) {
  char b[65536];
  while (recv(*(int *)p, b, sizeof b, 0) > 0)
    ;
  return 0;
}
static int cmp(const void *a, const void *b) {
  double x = *(double *)a, y = *(double *)b;
  return (x > y) - (x < y);
}
int main(int c, char **v) {
  kind = v[1];
  where = v[2];
  n = atol(v[4]);
  size = atol(v[5]);
  int ns = c > 6 ? atoi(v[6]) : 1;
  if (getenv("BATCH"))
    batch = atoi(getenv("BATCH"));
  char *b = malloc(1 << 20);
  size_t k = pub_bytes(b);
  if (!strcmp(v[3], "pingpong")) {
    int s = join(1, 0), p = join(0, 1);
    double *l = malloc(8 * n);
    char r[1 << 17];
    pthread_t t;
    pthread_create(&t, 0, drain, &p);
    for (long i = 0; i < n; i++) {
      double t0 = now();
      all(p, b, k);
      size_t left = msg_bytes();
      while (left) {
        ssize_t x = recv(s, r, left, 0);
        if (x <= 0)
          die("recv");
        left -= x;
      }
      l[i] = now() - t0;
    }
    qsort(l, n, 8, cmp);
    printf("pingpong p50_us=%.1f p99_us=%.1f\n", l[n / 2] * 1e6,
           l[n * 99 / 100] * 1e6);
    return 0;
  }
  struct task s[256];
  pthread_t t[256], d;
  for (int i = 0; i < ns; i++)
    s[i].fd = join(1, i);
  int p = join(0, 999);
  pthread_create(&d, 0, drain, &p);
  for (int i = 1; i < batch; i++)
    memcpy(b + i * k, b, k);
  double t0 = now(), end = 0;
  for (int i = 0; i < ns; i++)
    pthread_create(&t[i], 0, reader, &s[i]);
  for (long i = 0; i < n; i += batch)
    all(p, b, k * batch);
  for (int i = 0; i < ns; i++) {
    pthread_join(t[i], 0);
    if (s[i].done > end)
      end = s[i].done;
  }
  printf("%s delivered/s=%.0f\n", v[3], n * ns / (end - t0));
  return 0;
}
