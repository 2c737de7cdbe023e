// The report, README's tables and the history.
#include "tests/tools/cli_fixture.h"

namespace tessera::test {
namespace {

Json timed(double median) { return {{"status", "ok"}, {"median_s", median}, {"error_over_allowed", 0.2}}; }

Json peers_of(const Json& rows) {
  return {{"environment", {{"date", "2026-01-02"}, {"gpu", "A & B"}, {"torch", "2.0"}, {"tessera", "0.2.0"}}},
          {"rows", rows}};
}

Json peers_of_one_cell(double ours, double theirs) {
  const Json fields{{"dtype", "bf16"}, {"batch", 1},   {"seq_q", 512}, {"seq_k", 512},  {"heads_q", 2},
                    {"heads_kv", 2},   {"dim_qk", 64}, {"dim_v", 64},  {"causal", true}};
  Json row{{"family", "attention"}, {"op", "forward"}, {"cell", "bf16/<one>"}, {"fields", fields},
           {"tags", {"table"}},     {"flops", 1e9},    {"bytes", 1e6},         {"unfused_bytes", 2e6}};
  row["entrants"] = {{"tessera", timed(ours)}, {"fa2", timed(theirs)}, {"cudnn", {{"status", "wrong"}}}};
  return peers_of(Json::array({row}));
}

// Peers as files had them before rows named their fields.
Json older_form(Json peers) {
  for (Json& row : peers["rows"]) {
    const Json fields = row["fields"], tags = row["tags"];
    for (const char* name : {"family", "fields", "tags"}) row.erase(name);
    row.update({{"dtype", fields["dtype"]},
                {"batch", fields["batch"]},
                {"seq", fields["seq_k"]},
                {"heads", fields["heads_q"]},
                {"heads_kv", fields["heads_kv"]},
                {"dim", fields["dim_qk"]},
                {"causal", fields["causal"]},
                {"small", tags[0] != "table"}});
  }
  return peers;
}

TEST_F(Cli, report_says_what_it_cannot_read_and_keeps_no_history_of_it) {
  std::filesystem::create_directories(file("results"));
  const std::string common = "report --results " + file("results");
  const Answer picture = run(common + " --picture " + file("speed.svg"));
  EXPECT_EQ(picture.code, 2) << picture.text;
  EXPECT_TRUE(holds(picture.text, "no speed beside peers")) << picture.text;
  const Answer readme = run(common + " --readme " + file("README.md"));
  EXPECT_EQ(readme.code, 2) << readme.text;
  EXPECT_TRUE(holds(readme.text, "cannot read " + file("README.md"))) << readme.text;
  EXPECT_EQ(run("report --results " + file("none") + " --history " + file("history/runs.db")).code, 2);
  EXPECT_FALSE(std::filesystem::exists(file("history")));
}

TEST_F(Cli, report_is_one_page_that_shows_losses_and_asks_for_nothing) {
  std::filesystem::create_directories(file("results/gpu"));
  std::ofstream(file("results/gpu/peers.json")) << peers_of_one_cell(2e-3, 1e-3);
  const std::string common = "report --results " + file("results") + " --history " + file("history.db");
  ASSERT_EQ(run(common + " --output " + file("report.html") + " --json " + file("runs.json")).code, 0);
  EXPECT_EQ(json("runs.json")["new_runs"], 1);
  const std::string page = text_of("report.html");
  EXPECT_TRUE(holds(page, "A &amp; B"));
  EXPECT_TRUE(holds(page, "bf16/&lt;one&gt;"));
  EXPECT_TRUE(holds(page, "class=\"loss\""));
  EXPECT_TRUE(holds(page, ">0.50<"));
  EXPECT_TRUE(holds(page, ">wrong<"));
  for (const char* never : {"<script", "http:", "https:", "src=", "url("}) EXPECT_FALSE(holds(page, never)) << never;

  // The same file is one run; another one is a second, and the page then has a table over time.
  run(common + " --output " + file("report.html") + " --json " + file("runs.json"));
  EXPECT_EQ(json("runs.json")["new_runs"], 0);
  EXPECT_EQ(json("runs.json")["runs"].size(), 1U);
  std::ofstream(file("results/gpu/peers.json")) << peers_of_one_cell(1e-3, 1e-3);
  run(common + " --output " + file("report.html") + " --json " + file("runs.json"));
  EXPECT_EQ(json("runs.json")["runs"].size(), 2U);
  EXPECT_TRUE(holds(text_of("report.html"), "Over time"));
}

TEST_F(Cli, report_shows_decode_beside_peers_with_losses_and_says_which_op_ran) {
  std::filesystem::create_directories(file("results/gpu"));
  Json peers = peers_of_one_cell(1e-3, 1e-3);
  Json decode = peers["rows"][0];
  decode["op"] = "decode";
  decode["cell"] = "bf16/b1_s1024_h32:8_d128";
  decode["tags"] = {"decode"};
  decode["fields"]["seq_q"] = 1;
  decode["bytes"] = 4e7;
  decode["entrants"]["tessera"] = {{"status", "ok"}, {"median_s", 2e-5}, {"graph_s", 1.5e-5}, {"through", "forward"}};
  decode["entrants"]["fa2"] = {{"status", "ok"}, {"median_s", 1e-5}, {"graph_s", 0.5e-5}};
  peers["rows"].push_back(decode);
  std::ofstream(file("results/gpu/peers.json")) << peers;
  std::ofstream(file("README.md")) << "<!-- made by `tessera report --readme`: do not edit -->\n"
                                      "<!-- end of what `tessera report` made -->\n";
  const std::string common = "report --results " + file("results");
  ASSERT_EQ(run(common + " --output " + file("report.html") + " --history " + file("history.db")).code, 0);
  ASSERT_EQ(run(common + " --readme " + file("README.md")).code, 0);
  const std::string page = text_of("report.html");
  const std::string part = page.substr(std::min(page.size(), page.find("Decode bandwidth")));
  EXPECT_TRUE(holds(part, "Tessera ran through the forward op."));
  EXPECT_TRUE(holds(part, "\"figures\">10.0 / 5.0 / 4.00</td><td class=\"figures\">20.0 / 15.0 / 2.00</td>")) << part;
  EXPECT_TRUE(holds(part, "class=\"loss\" style=\"background:rgba(201,42,42,0.68)\">0.50</td>")) << part;
  EXPECT_TRUE(holds(part, ">wrong<"));
  EXPECT_TRUE(holds(page, "<td>decode</td><td class=\"bad\">0.500</td>")) << "among the sums at the top";
  const std::string text = text_of("README.md");
  EXPECT_TRUE(holds(text, "| `bf16/b1_s1024_h32:8_d128` | wrong | 10.0, 4.00 | 20.0, 2.00 |")) << text;
  EXPECT_TRUE(holds(text, "Tessera through the forward")) << text;
}

TEST_F(Cli, report_draws_lines_from_left_to_right_and_holds_deterministic_peers_against_our_deterministic_backward) {
  std::filesystem::create_directories(file("results/gpu"));
  Json peers = peers_of_one_cell(1e-3, 2e-3);
  Json& first = peers["rows"][0];
  first["op"] = "backward";
  first["entrants"] = {{"tessera", timed(1e-3)}, {"tessera-det", timed(4e-3)}, {"cudnn-det", timed(2e-3)}};
  Json shorter = first;
  shorter["cell"] = "bf16/shorter";
  shorter["fields"]["seq_q"] = shorter["fields"]["seq_k"] = 256;
  peers["rows"].push_back(shorter);
  std::ofstream(file("results/gpu/peers.json")) << peers;
  ASSERT_EQ(run("report --results " + file("results") + " --output " + file("report.html")).code, 0);
  const std::string page = text_of("report.html");
  EXPECT_TRUE(holds(page, "<td>cuDNN</td><td>deterministic backward</td><td class=\"bad\">0.500</td>")) << page;
  const std::size_t line = page.find("<polyline class=\"line s0\" points=\"");
  ASSERT_NE(line, std::string::npos);
  double x[2] = {}, y = 0;
  ASSERT_EQ(std::sscanf(page.c_str() + page.find("points=", line), "points=\"%lf,%lf %lf", &x[0], &y, &x[1]), 3);
  EXPECT_LT(x[0], x[1]);
}

TEST_F(Cli, report_shows_the_unfused_computation_from_a_file_of_its_own) {
  std::filesystem::create_directories(file("results/gpu"));
  std::ofstream(file("results/gpu/peers.json")) << peers_of_one_cell(1e-3, 2e-3);
  Json unfused = peers_of_one_cell(1e-3, 1e-3);
  unfused["rows"][0]["entrants"] = {{"tessera", timed(1e-3)}, {"math", timed(7e-3)}};
  std::ofstream(file("results/gpu/peers_unfused.json")) << unfused;
  ASSERT_EQ(run("report --results " + file("results") + " --output " + file("report.html")).code, 0);
  const std::string page = text_of("report.html");
  const std::string part = page.substr(std::min(page.size(), page.find("Beside PyTorch without a fused library")));
  EXPECT_TRUE(holds(part, "<th>forward, math</th>")) << page;
  EXPECT_TRUE(holds(part, ">7.00</td>")) << page;
}

TEST_F(Cli, report_shows_training_steps_and_the_rows_that_did_not_run) {
  std::filesystem::create_directories(file("results/gpu"));
  const Json fields{{"shape", "small"}, {"tokens_per_s", 2000000}, {"speedup", 3.5}};
  Json steps{{"environment", {{"date", "2026-01-02"}, {"gpu", "a GPU"}}}};
  steps["cases"] = {
      {{"family", "transformer_np"}, {"op", "step"}, {"name", "small/all"}, {"fields", fields}, {"median_s", 0.0175}},
      {{"family", "transformer_np"},
       {"op", "step"},
       {"name", "small/compiled"},
       {"fields", {{"shape", "small"}}},
       {"refused", "it does not compile"}}};
  std::ofstream(file("results/gpu/training.json")) << steps;
  ASSERT_EQ(run("report --results " + file("results") + " --output " + file("report.html")).code, 0);
  const std::string page = text_of("report.html");
  const std::string part = page.substr(std::min(page.size(), page.find("Training steps")));
  EXPECT_TRUE(holds(part, "<td>small/all</td><td>17.50</td><td>small</td><td>3.5</td><td>2000000</td>")) << part;
  EXPECT_TRUE(holds(part, "<td>small/compiled</td>")) << part;
  EXPECT_TRUE(holds(part, "it does not compile")) << part;
}

TEST_F(Cli, report_shows_products_over_the_best_of_pytorch_and_what_broken_kernels_showed) {
  std::filesystem::create_directories(file("results/gpu"));
  Json products{{"environment", {{"date", "2026-01-02"}, {"gpu", "a GPU"}}}};
  products["cases"] = {{{"name", "gemm/8x8x8"},
                        {"unit", "TFLOP/s"},
                        {"work", 4e12},
                        {"entrants",
                         {{"tessera", {{"median_s", 0.01}, {"samples_s", {0.01}}}},
                          {"pytorch", {{"median_s", 0.04}}},
                          {"pytorch 16", {{"median_s", 0.008}}}}}}};
  std::ofstream(file("results/gpu/products.json")) << products;
  Json broken{{"date", "2026-01-02"}, {"arch", "sm_90a"}};
  broken["rows"] = {{{"mutation", "a"}, {"race", "race"}, {"caught", true}},
                    {{"mutation", "b"}, {"race", ""}, {"caught", false}},
                    {{"mutation", "c"}, {"race", ""}, {"caught", nullptr}},
                    {{"mutation", "d"}, {"race", ""}, {"caught", false}, {"left", "not run"}}};
  std::ofstream(file("results/gpu/break_kernels.json")) << broken;
  ASSERT_EQ(run("report --results " + file("results") + " --output " + file("report.html")).code, 0);
  const std::string page = text_of("report.html");
  EXPECT_TRUE(holds(page, "gemm/8x8x8</td><td>TFLOP/s</td><td>400</td><td>500</td>")) << page;
  EXPECT_TRUE(holds(page, ">0.80</td>")) << page;
  EXPECT_TRUE(holds(page, "pytorch 16 500")) << page;
  EXPECT_TRUE(holds(page, "2 kernels were broken")) << page;
  EXPECT_TRUE(holds(page, "1 are races): the checks noticed 1 of them")) << page;
}

TEST_F(Cli, report_reads_results_of_the_older_form_alike) {
  Json peers = peers_of_one_cell(1e-3, 2e-3);
  for (const char* tag : {"small", "decode"}) {
    Json row = peers["rows"][0];
    row["op"] = std::string(tag) == "decode" ? "decode" : "backward";
    row["cell"] = std::string("bf16/") + tag;
    row["tags"] = {tag};
    if (row["op"] == "decode") row["fields"]["seq_q"] = 1;
    peers["rows"].push_back(row);
  }
  Json bench{{"date", "2026-01-02"}, {"version", "0.2.0"}, {"ceilings", {{"mma", 6e14}, {"copy_bytes_per_s", 4e12}}}};
  bench["cases"] = {{{"name", "dec/one"},
                     {"family", "attention"},
                     {"op", "attention_decode"},
                     {"fields", {{"dtype", "bf16"}, {"batch", 1}, {"seq_k", 64}}},
                     {"bytes", 4e7},
                     {"median_s", 1e-5},
                     {"part_of_ceiling", 0.5}}};
  Json older_bench = bench;
  older_bench["cases"][0].erase("family");
  older_bench["cases"][0].update(older_bench["cases"][0]["fields"]);
  older_bench["cases"][0].erase("fields");
  for (const auto& [name, p, b] :
       {std::tuple{"new", peers, bench}, std::tuple{"older", older_form(peers), older_bench}}) {
    const std::string folder = std::string(name) + "/gpu/";
    std::filesystem::create_directories(file(folder));
    std::ofstream(file(folder + "peers.json")) << p;
    std::ofstream(file(folder + "bench.json")) << b;
    const std::string page = std::string(name) + ".html";
    ASSERT_EQ(run("report --results " + file(name) + " --output " + file(page)).code, 0) << name;
  }
  const std::string page = text_of("new.html");
  for (const char* part : {"Speed by sequence length", "forward, D = 64, causal", "Small shapes", "bf16/small",
                           "Decode bandwidth", "bf16/decode", "dec/one", "50 %", "Roofline"}) {
    EXPECT_TRUE(holds(page, part)) << part;
  }
  EXPECT_EQ(page, text_of("older.html"));
}

TEST_F(Cli, report_shows_a_family_without_a_presentation_with_all_its_fields) {
  const Json fields{{"dtype", "bf16"}, {"m", 4096}, {"n", 14336}, {"k", 512}, {"layout", "<tn>"}};
  Json row{{"family", "gemm"},  {"op", "grouped"}, {"cell", "bf16/m4096"}, {"fields", fields},
           {"tags", {"table"}}, {"flops", 6e10},   {"bytes", 1.2e8}};
  row["entrants"] = {{"tessera", timed(2e-4)}, {"cublas", timed(1e-4)}, {"other", {{"status", "refused"}}}};
  Json peers = peers_of_one_cell(1e-3, 2e-3);
  peers["rows"].push_back(row);
  // A row of a known op that lacks what its charts need is not lost either.
  Json odd = peers["rows"][0];
  odd["cell"] = "bf16/odd";
  odd["fields"] = {{"tokens", 77}};
  peers["rows"].push_back(odd);
  const Json bench{{"date", "2026-01-02"},
                   {"ceilings", {{"mma", 6e14}, {"copy_bytes_per_s", 4e12}}},
                   {"cases",
                    {{{"name", "gemm/one"},
                      {"family", "gemm"},
                      {"op", "gemm_grouped"},
                      {"fields", {{"experts", 8}}},
                      {"flops", 1e9},
                      {"median_s", 1e-5},
                      {"p95_s", 2e-5},
                      {"part_of_ceiling", 0.25}},
                     {{"name", "norm/one"},
                      {"family", "norm"},
                      {"op", "norm"},
                      {"fields", {{"width", 8192}}},
                      {"refused", "no kernel"}},
                     {{"name", "moe/one"},
                      {"family", "moe"},
                      {"op", "moe"},
                      {"fields", {{"scoring", "softmax"}, {"top_k", 2}}},
                      {"refused", "no kernel"}},
                     {{"name", "moe/two"},
                      {"family", "moe"},
                      {"op", "moe"},
                      {"fields", {{"scoring", "softmax"}, {"top_k", 8}}},
                      {"refused", "no kernel"}}}}};
  std::filesystem::create_directories(file("results/gpu"));
  std::ofstream(file("results/gpu/peers.json")) << peers;
  std::ofstream(file("results/gpu/bench.json")) << bench;
  ASSERT_EQ(run("report --results " + file("results") + " --output " + file("report.html")).code, 0);
  const std::string page = text_of("report.html");
  const std::string gemm = page.substr(std::min(page.size(), page.find("<h2>gemm grouped</h2>")));
  EXPECT_TRUE(holds(gemm, "<th>dtype</th><th>k</th><th>layout</th><th>m</th><th>n</th>")) << gemm;
  EXPECT_TRUE(
      holds(gemm, "<td>bf16/m4096</td><td>bf16</td><td>512</td><td>&lt;tn&gt;</td><td>4096</td><td>14336</td>"));
  EXPECT_TRUE(holds(gemm, "<td class=\"figures\">200.0 / 300.0 / 0.60</td>")) << gemm;
  EXPECT_TRUE(holds(gemm, ">0.50</td>")) << "the ratio to cublas";
  EXPECT_TRUE(holds(gemm, ">refused<"));
  EXPECT_TRUE(holds(gemm, "<th>experts</th>")) << gemm;
  EXPECT_TRUE(
      holds(gemm, "gemm/one</td><td>8</td><td class=\"figures\">10.0 / 100.0 / -</td><td>20.0</td><td>25 %</td>"))
      << gemm;
  EXPECT_TRUE(holds(page, "<td>cuBLAS</td><td>gemm grouped</td><td class=\"bad\">0.500</td>")) << "the sums at the top";
  EXPECT_TRUE(holds(page, "<h2>norm</h2>"));
  EXPECT_TRUE(holds(page, "norm/one</td><td>8192</td><td class=\"soft\" title=\"no kernel\">refused</td>"));
  EXPECT_TRUE(holds(page, "In all rows: scoring: softmax.</p>")) << "a column that says nothing makes a table wide";
  EXPECT_FALSE(holds(page, "<th>scoring</th>"));
  EXPECT_TRUE(holds(page, "<th>top k</th>"));
  EXPECT_TRUE(holds(page, "<h2>attention forward</h2>"));
  EXPECT_TRUE(holds(page, "<td>bf16/odd</td><td>77</td>"));
  EXPECT_TRUE(holds(page, "Speed by sequence length")) << "attention keeps its charts";
  EXPECT_FALSE(holds(page, "Small shapes")) << "nothing is tagged small";
}

TEST_F(Cli, a_history_of_the_older_schema_keeps_its_runs) {
  // One run with columns for attention's dimensions, whose JSON file is gone.
  std::ofstream(file("older.py")) << R"python(
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
db.executescript("""
CREATE TABLE run(id INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, kind TEXT NOT NULL, gpu TEXT NOT NULL,
  date TEXT NOT NULL, version TEXT NOT NULL, suite TEXT NOT NULL, facts TEXT NOT NULL);
CREATE TABLE timing(run INTEGER NOT NULL REFERENCES run(id), op TEXT, cell TEXT, entrant TEXT, dtype TEXT,
  status TEXT, detail TEXT, batch INTEGER, seq INTEGER, heads INTEGER, dim INTEGER, causal INTEGER, small INTEGER,
  median REAL, p05 REAL, p95 REAL, graph REAL, host REAL, flops REAL, bytes REAL, unfused_bytes REAL, error REAL,
  part_of_ceiling REAL);
CREATE TABLE verdict(run INTEGER NOT NULL REFERENCES run(id), name TEXT, outcome TEXT, detail TEXT, error REAL);
CREATE INDEX timing_run ON timing(run);
CREATE INDEX verdict_run ON verdict(run);
INSERT INTO run VALUES(7, 'k', 'peers', 'gpu', '2025-01-02', '0.1.0', '', '{}');
""")
for entrant, median in (("tessera", 1e-3), ("fa2", 4e-3)):
    for small in (0, 1):
        db.execute("INSERT INTO timing VALUES(7,'forward',?,?,'bf16','ok','',1,512,2,96,1,?,?,0,0,0,0,1e9,1e6,2e6,0,0)",
                   (f"bf16/old{small}", entrant, small, median))
db.commit()
)python";
  const Answer made = run_program("python3", file("older.py") + " " + file("history.db"));
  ASSERT_EQ(made.code, 0) << made.text;
  std::filesystem::create_directories(file("none"));
  const std::string common = " --history " + file("history.db") + " --output " + file("report.html");
  const Answer first = run("report --results " + file("none") + common);
  ASSERT_EQ(first.code, 0) << first.text;
  const std::string page = text_of("report.html");
  EXPECT_TRUE(holds(page, "forward, D = 96, causal")) << page;
  EXPECT_TRUE(holds(page, ">4.00</td>")) << page;
  EXPECT_TRUE(holds(page, "title=\"bf16/old1\"")) << "a small shape";
  EXPECT_TRUE(holds(page, "0 of 1")) << "the small shape is in no sum";

  std::filesystem::create_directories(file("results/gpu"));
  std::ofstream(file("results/gpu/peers.json")) << peers_of_one_cell(1e-3, 2e-3);
  const Answer second = run("report --results " + file("results") + common + " --json " + file("runs.json"));
  ASSERT_EQ(second.code, 0) << second.text;
  EXPECT_EQ(json("runs.json")["new_runs"], 1);
  EXPECT_EQ(json("runs.json")["runs"].size(), 2U);
  const std::string both = text_of("report.html");
  EXPECT_TRUE(holds(both, "Over time"));
  EXPECT_TRUE(holds(both, "<td>2025-01-02</td><td>0.1.0</td><td>4.000</td>")) << both;
}

TEST_F(Cli, tables_in_a_readme_drift_when_results_change) {
  std::filesystem::create_directories(file("results/gpu"));
  std::ofstream(file("results/gpu/peers.json")) << peers_of_one_cell(2e-3, 1e-3);
  std::ofstream(file("README.md")) << "before\n<!-- made by `tessera report --readme`: do not edit -->\nold\n"
                                      "<!-- end of what `tessera report` made -->\nafter\n";
  const std::string command =
      "report --results " + file("results") + " --readme " + file("README.md") + " --picture " + file("speed.svg");
  EXPECT_EQ(run(command + " --check").code, 1);
  EXPECT_EQ(run(command).code, 0);
  EXPECT_EQ(run(command + " --check").code, 0);
  const std::string text = text_of("README.md");
  EXPECT_EQ(text.rfind("before\n", 0), 0U);
  EXPECT_TRUE(holds(text, "| forward | fa2 | 0.50 | 0.50 |")) << text;
  EXPECT_FALSE(holds(text, "old"));
  EXPECT_TRUE(text.ends_with("after\n"));
  std::ofstream(file("results/gpu/peers.json")) << peers_of_one_cell(1e-3, 1e-3);
  const Answer drifted = run(command + " --check");
  EXPECT_EQ(drifted.code, 1);
  EXPECT_TRUE(holds(drifted.text, "README.md is not what the results say")) << drifted.text;
  EXPECT_TRUE(holds(run("report --readme " + file("results/gpu/peers.json") + " --results " + file("results")).text,
                    "no part"));
}

}  // namespace
}  // namespace tessera::test
