/* A client of the tensor bridge in plain C: the registry by its socket, the bytes by mmap; no library is needed.
 *
 *     cc -o client examples/tensor_client/client.c
 *     rota tensors door &                     # says where the socket is
 *     ./client SOCKET create NAME             # a 2 x 3 tensor of 0 1 2 3 4 5, published in place
 *     ./client SOCKET get NAME                # prints its numbers
 *     ./client SOCKET delete NAME
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { REPLY_BYTES_MAX = 8192, WAIT_S = 10 };

static void fail(const char *what, const char *detail) {
    fprintf(stderr, "%s: %s\n", what, detail);
    exit(1);
}

static FILE *dial(const char *path) {
    struct sockaddr_un where = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof where.sun_path) fail("the socket's path is too long", path);
    strcpy(where.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&where, sizeof where)) fail("cannot connect", path);
    return fdopen(fd, "r+");
}

/* Send one Redis command of `count` words. */
static void ask(FILE *redis, int count, ...) {
    va_list words;
    va_start(words, count);
    fprintf(redis, "*%d\r\n", count);
    for (int i = 0; i < count; i++) {
        const char *word = va_arg(words, const char *);
        fprintf(redis, "$%zu\r\n%s\r\n", strlen(word), word);
    }
    va_end(words);
    fflush(redis);
    fseek(redis, 0, SEEK_CUR); /* C asks for this between writing and reading one stream */
}

/* Read one reply; the last text of it goes to `out`. */
static void hear(FILE *redis, char *out) {
    char line[128];
    if (!fgets(line, sizeof line, redis)) fail("the registry", "closed the connection");
    long size = atol(line + 1);
    if (line[0] == '-') fail("the registry", line);
    if (line[0] == '*') {
        if (size < 0) fail("the bridge", "did not answer in time");
        for (long i = 0; i < size; i++) hear(redis, out);
    } else if (line[0] == '$') {
        if (size < 0 || size + 2 >= REPLY_BYTES_MAX) fail("the registry", "an answer of unexpected size");
        if (fread(out, 1, (size_t)size + 2, redis) != (size_t)size + 2) fail("the registry", "a short answer");
        out[size] = '\0';
    }
}

/* Where the value of a key begins in a reply. The bridge writes plain JSON with one space after each colon. */
static const char *value(const char *reply, const char *key) {
    char mark[64];
    snprintf(mark, sizeof mark, "\"%s\": ", key);
    const char *at = strstr(reply, mark);
    if (!at) fail("no such key in the reply", key);
    return at + strlen(mark);
}

static void command(FILE *redis, const char *op, const char *name, const char *more, char *reply) {
    char text[512], list[64], wait[8], id[32];
    snprintf(id, sizeof id, "c-%d", (int)getpid());
    snprintf(list, sizeof list, "tensor:reply:%s", id);
    snprintf(wait, sizeof wait, "%d", WAIT_S);
    snprintf(text, sizeof text, "{\"op\":\"%s\",\"name\":\"%s\",\"id\":\"%s\",\"client\":\"%s\"%s}", op, name, id, id, more);
    ask(redis, 3, "LPUSH", "tensor:cmd", text);
    hear(redis, reply);
    ask(redis, 3, "BLPOP", list, wait);
    hear(redis, reply);
    if (strncmp(value(reply, "ok"), "true", 4)) fail("refused", reply);
}

/* Map the bytes that a reply describes. The file is mapped from its first byte: an offset need not be of whole pages. */
static float *map(const char *reply, size_t *count) {
    char path[512];
    if (sscanf(value(reply, "seg"), "\"%511[^\"]", path) != 1) fail("no segment in", reply);
    size_t offset = strtoull(value(reply, "offset"), NULL, 10), bytes = strtoull(value(reply, "bytes"), NULL, 10);
    int fd = open(path, O_RDWR);
    if (fd < 0) fail("cannot open", path);
    char *base = mmap(NULL, offset + bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED) fail("cannot map", path);
    *count = bytes / sizeof(float);
    return (float *)(base + offset);
}

int main(int argc, char **argv) {
    static char reply[REPLY_BYTES_MAX];
    size_t count;
    if (argc != 4) fail("usage", "client SOCKET create|get|delete NAME");
    FILE *redis = dial(argv[1]);
    const char *op = argv[2], *name = argv[3];
    if (!strcmp(op, "create")) {
        command(redis, op, name, ",\"dtype\":\"f32\",\"shape\":[2,3],\"device\":-1,\"commit\":true", reply);
        float *tensor = map(reply, &count);
        for (size_t i = 0; i < count; i++) tensor[i] = (float)i;
    } else {
        command(redis, op, name, "", reply);
    }
    if (!strcmp(op, "get")) {
        float *tensor = map(reply, &count);
        for (size_t i = 0; i < count; i++) printf("%g ", tensor[i]);
        puts("");
    }
    command(redis, "leave", "", "", reply); /* the leases end now, not when their time is over */
    return 0;
}
