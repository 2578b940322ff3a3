// Calls functions of the library, as its caller says line by line on standard input:
//
//   call NAME INTEGERS n1 n2 ... FLOATS f1 f2 ...    answered by the result
//   text NAME n1                                     answered by the string, or an empty line if there is none
//   threads                                          lends the library threads, answered by 1
//
// INTEGERS and FLOATS are their numbers. Pointers are integers. They lead into memory that is shared with the caller,
// whose address here is the first line written.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

// By the procedure call standard of ARM on Linux integers and floats are counted apart, and every integer that has no
// register takes eight bytes. So a function may be called with more of both than it has.
using Any = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                        int64_t, int64_t, int64_t, int64_t, int64_t, float, float);
constexpr size_t MOST_INTEGERS = 16, MOST_FLOATS = 2;

namespace {

thread_local int number = 0, count = 1;

void parallel(void (*body)(void *), void *data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  auto run = [=](int me) {
    number = me;
    count = (int)threads;
    body(data);
  };
  for (unsigned me = 1; me < threads; me++) others.emplace_back(run, (int)me);
  run(0);
  for (std::thread &other : others) other.join();
  number = 0;
  count = 1;
}

template <class Number>
std::vector<Number> numbers(size_t most) {
  size_t given = 0;
  std::cin >> given;
  if (given > most) abort();
  std::vector<Number> read(most);
  for (size_t i = 0; i < given; i++) std::cin >> read[i];
  return read;
}

}  // namespace

int main(int, char **arguments) {  // the library, the shared file, its size
  void *library = dlopen(arguments[1], RTLD_NOW);
  if (!library) {
    std::cerr << dlerror() << std::endl;
    return 1;
  }
  const int file = open(arguments[2], O_RDWR);
  void *memory = mmap(nullptr, strtoull(arguments[3], nullptr, 10), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return 2;
  std::cout << (intptr_t)memory << std::endl;
  std::string what, name;
  while (std::cin >> what) {
    if (what == "threads") {
      auto use = (void (*)(void *, void *, void *))dlsym(library, "greenroom_use_threads");
      use((void *)parallel, (void *)(int (*)())[] { return number; }, (void *)(int (*)())[] { return count; });
      std::cout << 1 << std::endl;
      continue;
    }
    std::cin >> name;
    void *function = dlsym(library, name.c_str());
    if (!function) {
      std::cerr << dlerror() << std::endl;
      return 3;
    }
    if (what == "text") {
      int64_t which;
      std::cin >> which;
      const char *text = ((const char *(*)(int64_t))function)(which);
      std::cout << (text ? text : "") << std::endl;
      continue;
    }
    const auto i = numbers<int64_t>(MOST_INTEGERS);
    const auto f = numbers<float>(MOST_FLOATS);
    std::cout << ((Any)function)(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13], i[14],
                                 i[15], f[0], f[1])
              << std::endl;
  }
}
