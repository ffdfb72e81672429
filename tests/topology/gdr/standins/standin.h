/* What the stand-ins share: a library is told what to do by STANDIN, and tells what was done to it in STANDIN_REPORT.

   STANDIN="cuMemAlloc_v2=2 ibv_reg_mr=14 cuInit=crash"   a call's status or errno; `crash` and `hang` end it there
   STANDIN_REPORT=FILE                                    a line for every wrong call, and at exit one for what was kept

   -DHEADERS takes types and prototypes from the libraries' own headers, which proves that those here are the same:
   cc -DHEADERS -I CUDA/include -Wmissing-prototypes -fsyntax-only cuda.c ibverbs.c */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The number that STANDIN gives to a name; `otherwise` where it names it not. */
static int planned(const char *name, int otherwise) {
  const char *plan = getenv("STANDIN");
  size_t length = strlen(name);
  for (; plan && *plan; plan += strcspn(plan, " "), plan += strspn(plan, " ")) {
    if (strncmp(plan, name, length) || plan[length] != '=') continue;
    const char *value = plan + length + 1;
    if (!strncmp(value, "crash", 5)) *(volatile int *)0 = 0;
    while (!strncmp(value, "hang", 4)) pause();
    return atoi(value);
  }
  return otherwise;
}

static void report(const char *library, const char *text, int number) {
  const char *path = getenv("STANDIN_REPORT");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  fprintf(file, "%s: %s %d\n", library, text, number);
  fclose(file);
}

/* Says that a call was wrong, and returns whether it was. */
static int wrong(const char *library, const char *rule, int broken) {
  if (broken) report(library, rule, broken);
  return broken;
}

static unsigned long long page_nbytes(void) { return (unsigned long long)sysconf(_SC_PAGESIZE); }
