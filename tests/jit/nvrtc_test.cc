#include "jit/nvrtc.h"

#include <array>
#include <cstdio>

#include "jit/build_id.h"
#include "tests/jit/helpers.h"

namespace tessera::jit {
namespace {

// A fake of that name: "13.0" for fake/13.0/libnvrtc.so.13.
NvrtcPlace fake(const std::string& name, const std::string& reason = "toolkit") {
  return {TESSERA_FAKES "/" + name + "/libnvrtc.so." + name.substr(0, 2), reason, true};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// What this program prints in a process of its own, with these environment variables ("NAME=value ...").
std::string printed_by(const std::string& mode, const std::string& environment) {
  const std::string command =
      "env " + environment + " " + std::filesystem::read_symlink("/proc/self/exe").string() + " " + mode;
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return "popen failed";
  std::string text;
  for (int c = 0; (c = fgetc(pipe)) != EOF;) text += static_cast<char>(c);
  return pclose(pipe) == 0 ? text : "failed: " + text;
}

TEST(NvrtcChoice, a_driver_loads_cubins_of_its_major_version_and_ptx_up_to_its_own_version) {
  struct Case {
    int nvrtc;
    int driver;
    bool cubin;
    bool ptx;
  };
  for (const Case& c : {Case{12000, 12040, true, true},
                        {12040, 12040, true, true},
                        {12050, 12040, true, false},
                        {12090, 12000, true, false},
                        {13000, 12090, false, false},
                        {12090, 13000, true, true},
                        {13010, 13000, true, false},
                        {12000, 11080, false, false},
                        {13040, 0, true, true}}) {
    EXPECT_EQ(fits_driver(c.nvrtc, c.driver, false), c.cubin) << c.nvrtc << " " << c.driver;
    EXPECT_EQ(fits_driver(c.nvrtc, c.driver, true), c.ptx) << c.nvrtc << " " << c.driver;
  }
}

TEST(NvrtcChoice, the_first_that_fits_is_used_even_if_a_newer_one_follows) {
  const std::array versions = {0, 13000, 12090, 0, 12030, 12080};
  EXPECT_EQ(choose_nvrtc(versions, 0, false), 1);  // no driver: the first that opens
  EXPECT_EQ(choose_nvrtc(versions, 0, true), 1);
  EXPECT_EQ(choose_nvrtc(versions, 13000, true), 1);
  EXPECT_EQ(choose_nvrtc(versions, 12040, false), 2);
  EXPECT_EQ(choose_nvrtc(versions, 12040, true), 4);
  EXPECT_EQ(choose_nvrtc(versions, 12080, true), 4);
}

TEST(NvrtcChoice, if_none_fits_the_oldest_is_used) {
  EXPECT_EQ(choose_nvrtc(std::array{13010, 0, 13000, 13000}, 12040, false), 2);
  EXPECT_EQ(choose_nvrtc(std::array{12090, 12050, 13000}, 12040, true), 1);
  EXPECT_EQ(choose_nvrtc(std::array{0, 0}, 12040, false), -1);
  EXPECT_EQ(choose_nvrtc({}, 0, false), -1);
}

TEST(NvrtcSearch, every_place_says_what_came_of_it) {
  const TemporaryFolder folder;
  write_file(folder.path + "/libnvrtc.so.13", "not a library");
  const NvrtcSearch search = search_places({{"/nowhere/libnvrtc.so.13", "CUDA_HOME", false},
                                            {folder.path + "/libnvrtc.so.13", "toolkit", true},
                                            fake("11.8"),
                                            fake("13.0"),
                                            fake("12.9", "wheel in VIRTUAL_ENV"),
                                            fake("12.3")},
                                           12040, false);
  ASSERT_TRUE(search.info.ok()) << search.info.status().message();
  EXPECT_EQ(search.driver_version, 12040);
  ASSERT_EQ(search.places.size(), 6u);
  EXPECT_EQ(search.places[0].outcome, "not found");
  EXPECT_TRUE(has(search.places[1].outcome, "file too short")) << search.places[1].outcome;
  EXPECT_TRUE(has(search.places[2].outcome, "version 11.8; 12.0 or newer")) << search.places[2].outcome;
  EXPECT_EQ(search.places[3].version, 13000);
  EXPECT_TRUE(has(search.places[3].outcome, "passed over")) << search.places[3].outcome;
  EXPECT_TRUE(has(search.places[3].outcome, "12.4")) << search.places[3].outcome;
  EXPECT_EQ(search.places[4].outcome, "used");
  EXPECT_EQ(search.places[5].outcome, "not needed");
  for (std::size_t i = 0; i < search.places.size(); ++i) EXPECT_EQ(search.places[i].used, i == 4) << i;
  EXPECT_EQ(search.info->version(), 12090);
  EXPECT_EQ(search.info->reason, "wheel in VIRTUAL_ENV");
  EXPECT_EQ(search.info->path, std::filesystem::canonical(fake("12.9").path));
  EXPECT_TRUE(search.info->fits);
  EXPECT_EQ(search.info->note, "");
}

TEST(NvrtcSearch, ptx_may_need_an_older_nvrtc_than_cubins) {
  const std::vector places = {fake("13.0"), fake("12.9"), fake("12.3")};
  EXPECT_EQ(search_places(places, 12040, false).info->version(), 12090);
  EXPECT_EQ(search_places(places, 12040, true).info->version(), 12030);
  EXPECT_EQ(search_places(places, 13000, true).info->version(), 13000);
  EXPECT_EQ(search_places(places, 0, true).info->version(), 13000);
}

TEST(NvrtcSearch, one_that_does_not_fit_is_used_if_there_is_no_other_and_says_so) {
  const NvrtcSearch search = search_places({fake("13.9"), fake("13.0")}, 12040, false);
  ASSERT_TRUE(search.info.ok());
  EXPECT_EQ(search.info->version(), 13000);
  EXPECT_FALSE(search.info->fits);
  EXPECT_TRUE(has(search.info->note, "13.0")) << search.info->note;
  EXPECT_TRUE(has(search.info->note, "12.4")) << search.info->note;
  EXPECT_TRUE(has(search.info->note, "Install")) << search.info->note;
  EXPECT_TRUE(has(search.places[0].outcome, "passed over")) << search.places[0].outcome;
  EXPECT_TRUE(has(search.places[1].outcome, "used, although")) << search.places[1].outcome;
  EXPECT_TRUE(search.places[1].used);

  const NvrtcSearch forced = search_places({fake("12.9", "TESSERA_NVRTC")}, 12040, true);
  ASSERT_TRUE(forced.info.ok());
  EXPECT_EQ(forced.info->version(), 12090);
  EXPECT_FALSE(forced.info->fits);
  EXPECT_TRUE(has(forced.info->note, "PTX")) << forced.info->note;
  EXPECT_TRUE(has(forced.info->note, "TESSERA_NVRTC")) << forced.info->note;

  // No NVRTC that can be used fits a driver this old.
  const NvrtcSearch old = search_places({fake("12.3")}, 11080, false);
  EXPECT_FALSE(old.info->fits);
  EXPECT_TRUE(has(old.info->note, "Install a driver that supports CUDA 12.0 or newer")) << old.info->note;
}

TEST(NvrtcSearch, an_error_lists_every_place_with_its_reason_and_outcome) {
  const NvrtcSearch search =
      search_places({{"/nowhere/libnvrtc.so.13", "CUDA_HOME", false}, fake("11.8", "CUDA_PATH")}, 0, false);
  ASSERT_FALSE(search.info.ok());
  EXPECT_EQ(search.info.status().code(), TESSERA_COMPILE_FAILED);
  EXPECT_TRUE(has(search.info.status().message(), "/nowhere/libnvrtc.so.13 (CUDA_HOME): not found"));
  EXPECT_TRUE(has(search.info.status().message(), "(CUDA_PATH): version 11.8"));
}

TEST(NvrtcBuild, tells_builds_of_one_version_apart_with_or_without_a_build_id) {
  const auto build = [](const std::string& name) { return search_places({fake(name)}, 0, false).info->build; };
  EXPECT_EQ(build("13.0"), build("13.0"));
  EXPECT_EQ(build("13.0").size(), 40u) << build("13.0");
  EXPECT_NE(build("13.0"), build("13.0b"));
  EXPECT_EQ(build("12.3").rfind("file-", 0), 0u) << build("12.3");
  EXPECT_EQ(build("12.3"), build("12.3"));
  EXPECT_NE(build("12.3"), build("12.3b"));
}

TEST(NvrtcBuild, a_hash_of_samples_sees_the_size_and_the_first_and_the_last_byte) {
  const TemporaryFolder folder;
  const std::string path = folder.path + "/file";
  EXPECT_EQ(sampled_hash(path), "");
  for (const std::size_t size : {std::size_t{1}, std::size_t{5000}, std::size_t{1000003}}) {
    std::string bytes(size, 'x');
    write_file(path, bytes);
    const std::string before = sampled_hash(path);
    EXPECT_EQ(sampled_hash(path), before);
    write_file(path, bytes + "x");
    EXPECT_NE(sampled_hash(path), before) << size;
    for (const std::size_t at : {std::size_t{0}, size - 1}) {
      std::string changed = bytes;
      changed[at] = 'y';
      write_file(path, changed);
      EXPECT_NE(sampled_hash(path), before) << size << " " << at;
    }
  }
}

TEST(NvrtcBuild, is_in_the_key) {
  const auto key = [](const std::string& name) {
    return printed_by("--key", "TESSERA_NVRTC=" TESSERA_FAKES "/" + name);
  };
  EXPECT_EQ(key("13.0").size(), 33u) << key("13.0");  // 32 digits and the line's end
  EXPECT_EQ(key("13.0"), key("13.0"));
  EXPECT_NE(key("13.0"), key("13.0b"));
}

TEST(Nvrtc, the_one_in_use_has_a_build) {
  REQUIRE_NVRTC();
  EXPECT_FALSE(nvrtc_info()->build.empty());
}

// The fake driver supports CUDA 12.4.
TEST(Nvrtc, is_chosen_for_the_driver_of_the_machine) {
  const std::string driver = "-u TESSERA_NVRTC LD_LIBRARY_PATH=" TESSERA_FAKES "/driver ";
  const TemporaryFolder folder;
  for (const char* name : {"13.9", "12.3"}) {
    std::filesystem::create_directory(folder.path + "/" + name);
    std::filesystem::create_symlink(TESSERA_FAKES "/" + std::string(name), folder.path + "/" + name + "/lib64");
  }
  const std::string toolkits = "CUDA_HOME=" + folder.path + "/13.9 CUDA_PATH=" + folder.path + "/12.3 ";
  EXPECT_EQ(printed_by("--nvrtc", driver + toolkits), "driver 12040\ncubin 12030 fits\nptx 12030 fits\n");
  EXPECT_EQ(printed_by("--nvrtc", driver + "TESSERA_NVRTC=" TESSERA_FAKES "/12.9"),
            "driver 12040\ncubin 12090 fits\nptx 12090 does not fit\n");
  EXPECT_EQ(printed_by("--nvrtc", driver + "TESSERA_NVRTC=" TESSERA_FAKES "/13.0"),
            "driver 12040\ncubin 13000 does not fit\nptx 13000 does not fit\n");
}

// The driver's refusal to load an image names the NVRTC as the likely reason only if it does not fit.
TEST(Nvrtc, the_error_of_a_refused_image_names_an_nvrtc_that_does_not_fit) {
  const auto refused = [](const std::string& nvrtc) {
    return printed_by("--refused", "LD_LIBRARY_PATH=" TESSERA_FAKES "/driver TESSERA_NVRTC=" TESSERA_FAKES "/" + nvrtc);
  };
  EXPECT_EQ(refused("12.3"),
            "cubin: loading: CUDA error 200 (no description)\n"
            "ptx: loading: CUDA error 222 (no description)\n"
            "launch: loading: CUDA error 1 (no description)\n");
  const std::string text = refused("13.0");
  EXPECT_TRUE(has(text, "cubin: loading: CUDA error 200 (no description)\nNVRTC 13.0 emits cubins")) << text;
  EXPECT_TRUE(has(text, "ptx: loading: CUDA error 222 (no description)\nNVRTC 13.0 emits PTX")) << text;
  EXPECT_TRUE(has(text, "launch: loading: CUDA error 1 (no description)\n")) << text;
}

TEST(NvrtcPlaces, an_explicit_place_is_the_only_one) {
  const ScopedEnvironment chosen("TESSERA_NVRTC", "/nowhere/libnvrtc.so.13");
  const auto places = nvrtc_places();
  ASSERT_EQ(places.size(), 1u);
  EXPECT_EQ(places[0].path, "/nowhere/libnvrtc.so.13");
  EXPECT_FALSE(places[0].exists);
}

TEST(NvrtcPlaces, come_in_the_documented_order) {
  TemporaryFolder folder;
  const std::string toolkit = folder.path + "/toolkit";
  const std::string venv = folder.path + "/venv";
  const std::string wheel = venv + "/lib/python3.11/site-packages/nvidia/cu13/lib";
  std::filesystem::create_directories(toolkit + "/lib64");
  std::filesystem::create_directories(wheel);
  write_file(toolkit + "/lib64/libnvrtc.so.13", "");
  write_file(wheel + "/libnvrtc.so.13", "");
  const ScopedEnvironment chosen("TESSERA_NVRTC", nullptr);
  const ScopedEnvironment home("CUDA_HOME", toolkit.c_str());
  const ScopedEnvironment active("VIRTUAL_ENV", venv.c_str());
  const auto places = nvrtc_places();
  const auto index_of = [&](const std::string& path) {
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (places[i].path == path) return static_cast<int>(i);
    }
    return -1;
  };
  EXPECT_EQ(index_of(toolkit + "/lib64/libnvrtc.so.13"), 0);
  EXPECT_GT(index_of(wheel + "/libnvrtc.so.13"), 0);
  EXPECT_GT(index_of("libnvrtc.so.13"), index_of(wheel + "/libnvrtc.so.13"));
  EXPECT_EQ(places.back().path, "libnvrtc.so");
}

TEST(Nvrtc, says_what_it_compiles_for_and_one_that_does_not_say_is_used_all_the_same) {
  REQUIRE_NVRTC();
  const std::vector<int> archs = nvrtc_info()->archs;
  for (const int arch : {75, 80, 86, 87, 89, 90}) {
    EXPECT_EQ(std::count(archs.begin(), archs.end(), arch), 1) << arch;
  }
  const NvrtcSearch silent = search_places({fake("12.9")}, 0, false);
  ASSERT_TRUE(silent.info.ok());
  EXPECT_TRUE(silent.info->archs.empty());
}

}  // namespace
}  // namespace tessera::jit
