#include <set>

#include "tests/jit/helpers.h"

namespace tessera::jit {
namespace {

TEST(Compile, the_program_is_the_header_and_one_call_with_its_config_by_field_name) {
  const KernelInstance instance = some_request("sm_80", DType::kBFloat16).instance;
  EXPECT_EQ(instance.config, "MmaPeakConfig{.dtype = DType::kBFloat16}");
  const std::string program = program_text(instance);
  EXPECT_NE(program.find("#include \"bench/mma_peak.cuh\""), std::string::npos);
  EXPECT_NE(program.find("__launch_bounds__(256, 2)"), std::string::npos);
  EXPECT_NE(program.find("mma_peak<" + instance.config + ">(params)"), std::string::npos);
}

TEST(Compile, a_cubin_comes_with_ptxas_report_and_ptx_without) {
  REQUIRE_NVRTC();
  const auto cubin = compile(some_request());
  ASSERT_TRUE(cubin.ok()) << cubin.status().message();
  EXPECT_EQ((*cubin)->bytes.substr(0, 4),
            "\x7f"
            "ELF");
  EXPECT_GT((*cubin)->resources.registers, 8);
  EXPECT_EQ((*cubin)->resources.spill_store_bytes, 0);
  EXPECT_EQ((*cubin)->resources.static_smem_bytes, 0);

  CompileRequest request = some_request();
  request.target.ptx = true;
  const auto ptx = compile(request);
  ASSERT_TRUE(ptx.ok()) << ptx.status().message();
  EXPECT_TRUE((*ptx)->is_ptx);
  EXPECT_EQ((*ptx)->target, "compute_80");
  EXPECT_NE((*ptx)->bytes.find(".target sm_80"), std::string::npos);
  EXPECT_EQ((*ptx)->bytes.back(), '\0');
  EXPECT_EQ((*ptx)->resources.registers, -1);
}

// The benchmark compares kernels with this one: its loop must contain nothing but products.
TEST(Compile, the_tensor_core_peak_keeps_all_its_products_on_every_arch) {
  REQUIRE_NVRTC();
  for (const std::string arch : kArchs) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      if (dtype == DType::kBFloat16 && arch == "sm_75") continue;
      CompileRequest request = some_request(arch, dtype);
      request.target.ptx = true;
      const auto ptx = compile(request);
      ASSERT_TRUE(ptx.ok()) << ptx.status().message();
      const std::string shape = arch == "sm_75" ? "mma.sync.aligned.m16n8k8" : "mma.sync.aligned.m16n8k16";
      int products = 0;
      for (std::size_t at = 0; (at = (*ptx)->bytes.find(shape, at)) != std::string::npos; ++at) ++products;
      EXPECT_GE(products, kMmaPeakChains * (arch == "sm_75" ? 2 : 1)) << arch;
      EXPECT_EQ(products % kMmaPeakChains, 0) << arch;
      request.target.ptx = false;
      const auto cubin = compile(request);
      ASSERT_TRUE(cubin.ok()) << cubin.status().message();
      EXPECT_EQ((*cubin)->resources.spill_store_bytes, 0) << arch;
    }
  }
}

TEST(Compile, a_second_compilation_of_the_same_kernel_reports_again) {
  REQUIRE_NVRTC();
  for (int i = 0; i < 2; ++i) {
    const auto image = compile(some_request());
    ASSERT_TRUE(image.ok());
    EXPECT_GT((*image)->resources.registers, 0);
  }
}

TEST(Compile, an_error_carries_the_compilers_words) {
  REQUIRE_NVRTC();
  CompileRequest request = some_request();
  request.instance.config = "MmaPeakConfig{.no_such_field = 1}";
  const auto image = compile(request);
  ASSERT_FALSE(image.ok());
  EXPECT_EQ(image.status().code(), TESSERA_COMPILE_FAILED);
  EXPECT_NE(image.status().message().find("no_such_field"), std::string::npos) << image.status().message();
}

TEST(Compile, the_key_changes_with_source_header_config_arch_kind_bounds_and_options) {
  REQUIRE_NVRTC();
  std::vector<CompileRequest> requests(9, some_request());
  requests[1].instance.config = some_request("sm_80", DType::kBFloat16).instance.config;
  requests[2].target.arch = "sm_86";
  requests[3].target.ptx = true;
  requests[4].extra_options = {"--use_fast_math"};
  requests[5].extra_sources = {{kSomeHeader, "// another kernel\n"}};
  requests[6].extra_sources = {{"tile/types.h", "// another header, two includes away\n"}};
  requests[7].instance.min_blocks = 1;
  requests[8].instance.threads = 128;
  std::set<std::string> keys;
  for (const CompileRequest& request : requests) {
    const auto key = key_of(request);
    ASSERT_TRUE(key.ok());
    keys.insert(key->hex());
  }
  EXPECT_EQ(keys.size(), requests.size());
}

TEST(Compile, the_key_does_not_change_with_what_the_kernel_does_not_include) {
  REQUIRE_NVRTC();
  CompileRequest request = some_request();
  request.extra_sources = {{"bench/other.cuh", "int x;"}};
  EXPECT_EQ(key_of(request)->hex(), key_of(some_request())->hex());
}

TEST(Sources, reachable_follows_includes_and_stays_inside_kernels) {
  std::set<std::string> paths;
  for (const Source* source : reachable(kSomeHeader, {})) paths.insert(source->path);
  EXPECT_EQ(paths,
            (std::set<std::string>{"bench/mma_peak.cuh", "bench/mma_peak_config.h", "ptx/mma.cuh", "tile/types.h"}));
}

TEST(Sources, kernels_include_nothing_from_outside_kernels) {
  std::set<std::string> known;
  for (const Source& source : embedded_sources()) known.insert(source.path);
  for (const Source& source : embedded_sources()) {
    std::istringstream lines(strip_comments(source.text));
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("#include", 0) != 0) continue;
      const std::size_t begin = line.find('"'), end = line.rfind('"');
      ASSERT_NE(begin, std::string::npos) << source.path << ": " << line;
      EXPECT_EQ(known.count(line.substr(begin + 1, end - begin - 1)), 1u) << source.path << ": " << line;
    }
  }
}

// A copy of kernels/ in which text is added to one file, which is created if it does not exist.
struct KernelFolder : TemporaryFolder {
  KernelFolder(const std::string& changed, const std::string& added) {
    for (const Source& source : embedded_sources()) write(source.path, source.text);
    write(changed, read_file(path + "/" + changed) + added);
  }
  void write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path + "/" + file).parent_path());
    write_file(path + "/" + file, text);
  }
};

TEST(Sources, what_a_folder_holds_is_compiled_and_has_a_key_and_a_hash_of_its_own) {
  REQUIRE_NVRTC();
  const Key key = *key_of(some_request());
  const std::string hash = code_hash(kSomeHeader);
  const KernelFolder same("new.cuh", "int x;"), commented(kSomeHeader, "// more\n"), deep("ptx/mma.cuh", "int x;\n"),
      broken(kSomeHeader, "no_such_type x;\n");
  const auto in_folder = [](const std::string& folder, auto&& check) {
    const ScopedEnvironment chosen("TESSERA_KERNEL_SOURCES", folder.c_str());
    ASSERT_TRUE(kernel_sources().status.ok()) << kernel_sources().status.message();
    check();
  };
  in_folder(same.path + "/", [&] {
    EXPECT_EQ(key_of(some_request())->hex(), key.hex());
    EXPECT_EQ(code_hash(kSomeHeader), hash);
  });
  in_folder(commented.path, [&] {
    EXPECT_NE(key_of(some_request())->hex(), key.hex());
    EXPECT_EQ(code_hash(kSomeHeader), hash);
  });
  in_folder(deep.path, [&] {
    EXPECT_NE(key_of(some_request())->hex(), key.hex());
    EXPECT_NE(code_hash(kSomeHeader), hash);
    EXPECT_TRUE(compile(some_request()).ok());
  });
  in_folder(broken.path, [&] {
    const auto image = compile(some_request());
    ASSERT_FALSE(image.ok());
    EXPECT_NE(image.status().message().find("no_such_type"), std::string::npos) << image.status().message();
  });
  EXPECT_EQ(key_of(some_request())->hex(), key.hex());
}

TEST(Sources, a_folder_that_cannot_be_used_is_an_error_and_nothing_else_is_compiled) {
  REQUIRE_NVRTC();
  const KernelFolder types("tile/types.h", "int x;\n"), config("bench/mma_peak_config.h", "int x;\n");
  KernelFolder missing("tile/types.h", "");
  std::filesystem::remove(missing.path + "/tile/types.h");
  const TemporaryFolder empty;
  for (const auto& [folder, part] : {std::pair{types.path, "its tile/types.h is not the one"},
                                     {config.path, "its bench/mma_peak_config.h is not the one"},
                                     {missing.path, "no tile/types.h"},
                                     {empty.path, "there is no "},
                                     {empty.path + "/nothing", "No such file"}}) {
    const ScopedEnvironment chosen("TESSERA_KERNEL_SOURCES", folder.c_str());
    for (const Status& s : {key_of(some_request()).status(), compile(some_request()).status()}) {
      EXPECT_EQ(s.code(), TESSERA_COMPILE_FAILED);
      EXPECT_NE(s.message().find(part), std::string::npos) << s.message();
      EXPECT_NE(s.message().find(folder), std::string::npos) << s.message();
    }
    EXPECT_TRUE(kernel_sources().files.empty());
  }
  const KernelFolder commented("tile/types.h", "// the host does not see this either\n");
  const ScopedEnvironment chosen("TESSERA_KERNEL_SOURCES", commented.path.c_str());
  EXPECT_TRUE(key_of(some_request()).ok());
}

TEST(Sources, stripping_comments_leaves_code_and_literals) {
  EXPECT_EQ(strip_comments("int a;  // one\n\n/* two\n */ int  b = 1'000;\n"), "int a;\nint b = 1'000;\n");
  EXPECT_EQ(strip_comments("f(\"// no  comment\", '\"', '\\'');"), "f(\"// no  comment\", '\"', '\\'');");
}

TEST(Report, is_read_out_of_the_log) {
  const Resources r = parse_resources(
      "ptxas info    : 12 bytes gmem\n"
      "ptxas info    : Function properties for tessera_mma_peak\n"
      "    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 1 barriers, 6144 bytes smem, 500 bytes cmem[0]\n");
  EXPECT_EQ(r, (Resources{168, 16, 24, 32, 6144, false}));
  EXPECT_TRUE(parse_resources("ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
                              "serialized due to something in function 'f'")
                  .wgmma_serialized);
}

}  // namespace
}  // namespace tessera::jit
