// Waits for `attnrewrite compare --rpc HOST:PORT` and runs what it sends: rpc_server [PORT], 9090 by default
//
// What `python -m tvm.exec.rpc_server` does on a board, without Python: for phones, and for boards that have none. Anyone
// who reaches the port can run code here: keep it to a network of your own, or to a cable (adb forward tcp:9090 tcp:9090).
// README.md says how it is built: it needs the headers of tvm_ffi, and libtvm_runtime and libtvm_ffi for the processor that
// it runs on, which the wheels of apache-tvm and -ffi hold.
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>

namespace ffi = tvm::ffi;
namespace fs = std::filesystem;

constexpr int32_t kMagic = 0xff271;        // what either side says first
constexpr int32_t kMismatch = kMagic + 2;  // to who asks for a server of another name
constexpr int32_t kLongestName = 1024;     // bytes
const std::string kClient = "client:", kServer = "server:", kTimeout = "-timeout=";

void Send(int to, const void* data, size_t bytes) {
  for (const char* at = static_cast<const char*>(data); bytes > 0;) {
    ssize_t sent = send(to, at, bytes, 0);
    if (sent <= 0) throw std::runtime_error("the connection ended");
    at += sent, bytes -= sent;
  }
}

void Receive(int from, void* data, size_t bytes) {
  for (char* at = static_cast<char*>(data); bytes > 0;) {
    ssize_t received = recv(from, at, bytes, 0);
    if (received <= 0) throw std::runtime_error("the connection ended");
    at += received, bytes -= received;
  }
}

int32_t Number(int from) {
  int32_t number;
  Receive(from, &number, sizeof number);
  return number;
}

// Names are exchanged first: the client's, which is "client:" and its options, and then ours. Gives the seconds that a
// session may take, 0 for any.
unsigned Greet(int connection) {
  if (Number(connection) != kMagic) throw std::runtime_error("this is not TVM's RPC");
  const int32_t length = Number(connection);
  if (length < 0 || length > kLongestName) throw std::runtime_error("this is not TVM's RPC");
  std::string name(length, '\0');
  Receive(connection, name.data(), name.size());
  const bool ours = name.substr(0, name.find(' ')) == kClient;
  const int32_t answer = ours ? kMagic : kMismatch, size = kServer.size();
  Send(connection, &answer, sizeof answer);
  if (!ours) throw std::runtime_error("it asks for " + name);
  Send(connection, &size, sizeof size);
  Send(connection, kServer.data(), kServer.size());
  const size_t at = name.find(kTimeout);
  return at == std::string::npos ? 0 : std::ceil(std::atof(name.c_str() + at + kTimeout.size()));
}

// One session, whose files lie in `folder`.
void Serve(int connection, const fs::path& folder) {
  alarm(Greet(connection));  // what hangs is ended
  // A name is that of a file in the folder: whatever else it says is left out.
  auto path = [folder](const ffi::String& name) { return (folder / fs::path(std::string(name)).filename()).string(); };
  ffi::Function::SetGlobal("tvm.rpc.server.workpath",
                           ffi::Function::FromTyped([path](ffi::String name) { return ffi::String(path(name)); }), true);
  ffi::Function::SetGlobal("tvm.rpc.server.load_module", ffi::Function::FromTyped([path](ffi::String name) {
                             return ffi::Module::LoadFromFile(path(name));
                           }), true);
  ffi::Function::GetGlobalRequired("rpc.ServerLoop")(connection);
}

// A process for each session: what crashes, or is not needed any more, takes nothing with it.
void Session(int connection) {
  std::string folder = (fs::temp_directory_path() / "attnrewrite-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) throw std::runtime_error("cannot make " + folder + ": set TMPDIR");
  const pid_t child = fork();
  if (child == 0) {
    try {
      Serve(connection, folder);
    } catch (const std::exception& error) {
      std::cerr << error.what() << std::endl;
      _exit(1);
    }
    _exit(0);
  }
  close(connection);
  waitpid(child, nullptr, 0);
  fs::remove_all(folder);
}

int Listening(int port) {
  const int socket_ = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
  setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  address.sin_port = htons(port);
  if (bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || listen(socket_, 1) != 0) {
    throw std::runtime_error("cannot listen on port " + std::to_string(port) + ": " + std::strerror(errno));
  }
  return socket_;
}

int main(int argc, char** argv) {
  const int port = argc < 2 ? 9090 : std::atoi(argv[1]);
  if (argc > 2 || port <= 0 || port > 65535) {
    std::cerr << "usage: rpc_server [PORT]" << std::endl;
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  try {
    const int listening = Listening(port);
    std::cout << "waiting on port " << port << std::endl;
    while (true) {
      const int connection = accept(listening, nullptr, nullptr);
      if (connection >= 0) Session(connection);
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
