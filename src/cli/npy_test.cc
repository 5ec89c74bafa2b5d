#include "src/cli/npy.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>

namespace cutloss::cli {
namespace {

class NpyTest : public testing::Test {
 protected:
  NpyTest() {
    std::string name = testing::TempDir() + "cutloss-npy-XXXXXX";
    directory_ = mkdtemp(name.data());
  }
  ~NpyTest() override { std::filesystem::remove_all(directory_); }

  std::string path(const std::string& name = "a.npy") const { return directory_ / name; }

  // A file with this header text and data, its length field set to match unless given.
  void write(std::string_view header, std::string_view data = "", int version = 1, std::int64_t length = -1) const {
    std::ofstream file(path(), std::ios::binary);
    file << "\x93NUMPY" << static_cast<char>(version) << '\0';
    std::size_t size = length < 0 ? header.size() : static_cast<std::size_t>(length);
    for (int k = 0; k < (version == 1 ? 2 : 4); ++k, size >>= 8) file.put(static_cast<char>(size & 0xff));
    file << header << data;
  }

  // Pads so that data begins at a multiple of 64 in version 1.
  static std::string padded(std::string header) {
    header.append(64 - (10 + header.size()) % 64, ' ');
    return header;
  }

  std::string refusal() const {
    const Result<NpyArray> array = read_npy(path());
    EXPECT_FALSE(array.ok());
    if (array.ok()) return "";
    EXPECT_EQ(array.status().code(), StatusCode::invalid_argument);
    EXPECT_NE(array.status().message().find(path()), std::string::npos);
    return array.status().message();
  }

  std::filesystem::path directory_;
};

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST_F(NpyTest, RoundTrip) {
  std::vector<float> values(12);
  std::iota(values.begin(), values.end(), 0.5f);
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{12}, {3, 4}, {2, 3, 2}}) {
    ASSERT_TRUE(write_npy(path(), DType::f32, shape, values.data()).ok());
    const Result<NpyArray> array = read_npy(path());
    ASSERT_TRUE(array.ok()) << array.status().message();
    EXPECT_EQ(array->type, NpyType::f32);
    EXPECT_EQ(array->shape, shape);
    EXPECT_EQ(array->strides.back(), 1);
    EXPECT_EQ(array->size(), 12);
    EXPECT_EQ(std::memcmp(array->data, values.data(), 12 * sizeof(float)), 0);
    EXPECT_EQ((std::filesystem::file_size(path()) - 12 * sizeof(float)) % 64, 0u);
  }
}

TEST_F(NpyTest, Float16AndBooleansAreOtherTypes) {
  const std::uint16_t values[] = {0x3C00, 0xC000, 0x0001};  // 1, -2, 2^-24
  ASSERT_TRUE(write_npy(path(), DType::f16, {3}, values).ok());
  const Result<NpyArray> array = read_npy(path());
  ASSERT_TRUE(array.ok()) << array.status().message();
  EXPECT_EQ(array->type, NpyType::f16);
  EXPECT_EQ(to_floats(array.value()), (std::vector<float>{1, -2, 0x1p-24f}));
  EXPECT_HAS(to_ids(array.value(), "soft_ids").status().message(), "soft_ids are float16; they must be integers");
  const std::uint8_t flags[] = {1, 0, 2};
  ASSERT_TRUE(write_npy(path(), {3}, flags).ok());
  const Result<NpyArray> truths = read_npy(path());
  ASSERT_TRUE(truths.ok()) << truths.status().message();
  EXPECT_EQ(truths->type, NpyType::boolean);
  EXPECT_EQ(to_floats(truths.value()), (std::vector<float>{1, 0, 1}));
  EXPECT_HAS(to_ids(truths.value(), "labels").status().message(), "labels are bool; they must be integers");
}

TEST_F(NpyTest, Float64IsReadAsFloat32OrAsIds) {
  const double values[] = {0.1, -3, 1e39, NAN};
  write(padded("{'descr': '<f8', 'fortran_order': False, 'shape': (4,), }"),
        std::string(reinterpret_cast<const char*>(values), sizeof values));
  const Result<NpyArray> array = read_npy(path());
  ASSERT_TRUE(array.ok()) << array.status().message();
  EXPECT_EQ(array->type, NpyType::f64);
  const std::vector<float> got = to_floats(array.value());
  EXPECT_EQ(got[0], 0.1f);
  EXPECT_EQ(got[1], -3.0f);
  EXPECT_EQ(got[2], std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(got[3]));
  EXPECT_HAS(to_ids(array.value(), "labels").status().message(), "labels are float64; they must be integers");
}

TEST_F(NpyTest, FortranOrderIsRowMajorElsewhere) {
  write(padded("{'descr': '|i1', 'fortran_order': True, 'shape': (2, 3), }"), std::string("\1\4\2\5\3\6", 6));
  const Result<NpyArray> array = read_npy(path());
  ASSERT_TRUE(array.ok()) << array.status().message();
  EXPECT_EQ(to_ids(array.value(), "ids").value(), (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(to_floats(array.value()), (std::vector<float>{1, 2, 3, 4, 5, 6}));
}

TEST_F(NpyTest, Bfloat16IsTwoRawBytes) {
  const std::uint16_t values[] = {0x3F80, 0x4000, 0xC000};
  ASSERT_TRUE(write_npy(path(), DType::bf16, {3}, values).ok());
  const Result<NpyArray> array = read_npy(path());
  ASSERT_TRUE(array.ok());
  EXPECT_EQ(array->type, NpyType::bf16);
  EXPECT_EQ(std::memcmp(array->data, values, sizeof values), 0);
  for (const char* descr : {"<V2", "|V2", "bfloat16"}) {
    write(padded(std::string("{'descr': '") + descr + "', 'fortran_order': False, 'shape': (1,), }"), "\x80\x3F");
    ASSERT_TRUE(read_npy(path()).ok()) << descr;
  }
}

TEST_F(NpyTest, FortranOrderIsStrides) {
  write(padded("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }"), std::string(24, '\0'));
  const Result<NpyArray> array = read_npy(path());
  ASSERT_TRUE(array.ok());
  EXPECT_EQ(array->strides, (std::vector<std::int64_t>{1, 2}));
}

TEST_F(NpyTest, AnyOrderOfKeysAndVersions) {
  const std::string header = "{\"shape\":(3L,),'fortran_order':False,'descr':'|i1'}\n";
  for (const int version : {1, 2, 3}) {
    write(header, "\x01\x02\xFF", version);
    const Result<NpyArray> array = read_npy(path());
    ASSERT_TRUE(array.ok()) << array.status().message();
    EXPECT_EQ(to_ids(array.value(), "labels").value(), (std::vector<std::int64_t>{1, 2, -1}));
  }
}

TEST_F(NpyTest, EmptyAndScalar) {
  ASSERT_TRUE(write_npy(path(), DType::f32, {0, 5}, nullptr).ok());
  EXPECT_EQ(read_npy(path())->size(), 0);
  write(padded("{'descr': '<f4', 'fortran_order': False, 'shape': (), }"), std::string(4, '\0'));
  EXPECT_EQ(read_npy(path())->size(), 1);
  // Extents beside a zero may be anything.
  write(padded("{'descr': '<f4', 'fortran_order': False, 'shape': (9000000000000000000, 9000000000000000000, 0), }"));
  ASSERT_TRUE(read_npy(path()).ok());
  EXPECT_EQ(read_npy(path())->size(), 0);
}

TEST_F(NpyTest, LabelsOfEveryIntegerType) {
  const std::string data(64, '\x01');
  for (const char* descr : {"|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8"}) {
    write(padded(std::string("{'descr': '") + descr + "', 'fortran_order': False, 'shape': (2,), }"), data);
    const Result<NpyArray> array = read_npy(path());
    ASSERT_TRUE(array.ok()) << descr;
    const auto labels = to_ids(array.value(), "labels");
    ASSERT_TRUE(labels.ok());
    EXPECT_EQ(labels.value()[0], 0x0101010101010101 & (descr[2] == '8' ? -1 : (1LL << (8 * (descr[2] - '0'))) - 1));
  }
  write(padded("{'descr': '<u8', 'fortran_order': False, 'shape': (1,), }"), std::string(8, '\xFF'));
  EXPECT_HAS(to_ids(read_npy(path()).value(), "labels").status().message(), "labels[0]");
  write(padded("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }"), std::string(4, '\0'));
  EXPECT_HAS(to_ids(read_npy(path()).value(), "labels").status().message(), "integers");
}

TEST_F(NpyTest, NotAnArray) {
  EXPECT_HAS(refusal(), "No such file");
  std::ofstream(path()).close();
  EXPECT_HAS(refusal(), "empty");
  std::ofstream(path()) << "PK\x03\x04 an .npz, say";
  EXPECT_HAS(refusal(), "not a .npy file");
  const Result<NpyArray> directory = read_npy(directory_);
  EXPECT_HAS(directory.status().message(), "not a regular file");
  ASSERT_EQ(mkfifo(path("fifo").c_str(), 0600), 0);
  EXPECT_HAS(read_npy(path("fifo")).status().message(), "not a regular file");  // and does not wait for a writer
}

TEST_F(NpyTest, UnsupportedTypesSayWhatToDo) {
  const auto refusal_of = [&](const std::string& descr) {
    write(padded("{'descr': " + descr + ", 'fortran_order': False, 'shape': (1,), }"), std::string(16, '\0'));
    return refusal();
  };
  EXPECT_HAS(refusal_of("'>f4'"), "big-endian");
  EXPECT_HAS(refusal_of("'>f8'"), "big-endian");
  EXPECT_HAS(refusal_of("'|O'"), "not supported");
  EXPECT_HAS(refusal_of("'<c8'"), "not supported");
  EXPECT_HAS(refusal_of("[('a', '<f4')]"), "structured");
  EXPECT_HAS(refusal_of("''"), "not supported");
  const std::string strange = refusal_of("'\x1b[31m" + std::string(1000, 'x') + "'");
  EXPECT_EQ(strange.find('\x1b'), std::string::npos);
  EXPECT_LT(strange.size(), 300 + path().size());
}

TEST_F(NpyTest, TruncatedData) {
  write(padded("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }"), std::string(47, '\0'));
  EXPECT_HAS(refusal(), "truncated: the header promises 48 bytes of data, the file has 47");
}

TEST_F(NpyTest, SizesThatOverflow) {
  for (const char* shape : {"(4294967296, 4294967296)", "(2305843009213693952, 2)", "(4611686018427387904,)",
                            "(2147483648, 2147483648, 2147483648)"}) {
    write(padded(std::string("{'descr': '<f4', 'fortran_order': False, 'shape': ") + shape + ", }"), "data");
    EXPECT_HAS(refusal(), "too large");
  }
  // Fits 64 bits, not this file: refused by its length, with nothing allocated.
  write(padded("{'descr': '|i1', 'fortran_order': False, 'shape': (1000000000000000,), }"), "data");
  EXPECT_HAS(refusal(), "truncated");
}

TEST_F(NpyTest, HostileHeaders) {
  const auto refused = [&](std::string_view header) {
    write(header, std::string(64, '\0'));
    EXPECT_HAS(refusal(), "header") << header;
  };
  refused("");
  refused("{}");
  refused("{'descr': '<f4', 'fortran_order': False}");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (1.5,)}");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (1 1)}");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': 1}");
  refused("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} + 1");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'extra': 1}");
  refused("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}");
  refused("{'descr': '<f4");
  refused("{'descr': '\\x3cf4', 'fortran_order': False, 'shape': (1,)}");
  refused("__import__('os').system('true')");
  std::string deep = "{'descr': '<f4', 'fortran_order': False, 'shape': (";
  for (int k = 0; k < 1000; ++k) deep += "1, ";
  refused(deep + ")}");
}

TEST_F(NpyTest, LengthFieldThatLies) {
  const std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }";
  write(header, "", 1, 60000);
  EXPECT_HAS(refusal(), "truncated");
  write(header, "", 2, 0xFFFFFFFF);
  EXPECT_HAS(refusal(), "over the limit");
  write(header, "data", 4);
  EXPECT_HAS(refusal(), "version 4");
  for (std::size_t bytes = 6; bytes < 12; ++bytes) {
    EXPECT_FALSE(parse_npy_header(std::string_view("\x93NUMPY\x02\x00\x40\x00\x00\x00", 12).substr(0, bytes)).ok());
  }
}

TEST_F(NpyTest, MisalignedData) {
  write("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }  ", "data");
  ASSERT_NE((10 + std::strlen("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }  ")) % 4, 0u);
  EXPECT_HAS(refusal(), "aligned");
}

TEST_F(NpyTest, UnwritablePathIsSaid) {
  const float value = 1;
  const Status status = write_npy(path("missing/a.npy"), DType::f32, {1}, &value);
  EXPECT_HAS(status.message(), "missing/a.npy");
}

}  // namespace
}  // namespace cutloss::cli
