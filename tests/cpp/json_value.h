// A strict reader of JSON for tests: whatever it takes is valid, whatever is not throws.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace fusewire::testing {

class Json {
 public:
  static Json parse(std::string_view text) {
    Parser parser{text};
    Json value = parser.value();
    parser.blanks();
    if (!parser.rest.empty()) throw std::runtime_error("JSON: something follows its end");
    return value;
  }

  // A member of an object; an empty value when there is none.
  const Json& operator[](const std::string& key) const {
    static const Json none;
    const auto found = members_.find(key);
    return found == members_.end() ? none : found->second;
  }
  const std::string& text() const { return text_; }
  double number() const { return number_; }
  const std::vector<Json>& items() const { return items_; }

 private:
  struct Parser {
    std::string_view rest;

    [[noreturn]] void fail(const std::string& what) const {
      throw std::runtime_error("JSON: " + what + " before '" + std::string(rest.substr(0, 60)) + "'");
    }
    void blanks() {
      while (!rest.empty() && std::string_view(" \t\n\r").find(rest[0]) != std::string_view::npos)
        rest.remove_prefix(1);
    }
    bool take(char c) {
      blanks();
      if (rest.empty() || rest[0] != c) return false;
      rest.remove_prefix(1);
      return true;
    }
    void expect(char c) {
      if (!take(c)) fail(std::string("no ") + c);
    }
    Json value() {
      blanks();
      if (rest.empty()) fail("the end");
      Json result;
      if (take('{')) {
        if (take('}')) return result;
        do {
          blanks();
          std::string key = string();
          expect(':');
          if (!result.members_.emplace(std::move(key), value()).second) fail("a key twice");
        } while (take(','));
        expect('}');
      } else if (take('[')) {
        if (take(']')) return result;
        do result.items_.push_back(value());
        while (take(','));
        expect(']');
      } else if (rest[0] == '"') {
        result.text_ = string();
      } else {
        const size_t end = rest.find_first_not_of("+-.0123456789eE");
        const std::string digits(rest.substr(0, end));
        char* stop = nullptr;
        result.number_ = std::strtod(digits.c_str(), &stop);
        if (digits.empty() || *stop != '\0') fail("no value");
        rest.remove_prefix(digits.size());
      }
      return result;
    }
    std::string string() {
      expect('"');
      std::string out;
      for (;;) {
        if (rest.empty()) fail("a string without an end");
        const char c = rest[0];
        rest.remove_prefix(1);
        if (c == '"') return check_utf8(out);
        if (static_cast<unsigned char>(c) < 0x20) fail("a control character");
        if (c != '\\') {
          out += c;
          continue;
        }
        if (rest.empty()) fail("an escape without an end");
        const char kind = rest[0];
        rest.remove_prefix(1);
        if (kind == '"' || kind == '\\' || kind == '/') {
          out += kind;
        } else if (kind == 'u' && rest.size() >= 4) {
          append(out, static_cast<uint32_t>(std::stoul(std::string(rest.substr(0, 4)), nullptr, 16)));
          rest.remove_prefix(4);
        } else {
          fail("an unknown escape");
        }
      }
    }
    static void append(std::string& out, uint32_t code) {
      if (code < 0x80) {
        out += static_cast<char>(code);
      } else if (code < 0x800) {
        out += static_cast<char>(0xc0 | (code >> 6));
        out += static_cast<char>(0x80 | (code & 0x3f));
      } else {
        out += static_cast<char>(0xe0 | (code >> 12));
        out += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
        out += static_cast<char>(0x80 | (code & 0x3f));
      }
    }
    const std::string& check_utf8(const std::string& text) const {
      for (size_t i = 0; i < text.size();) {
        const auto lead = static_cast<unsigned char>(text[i]);
        const size_t length = lead < 0x80 ? 1 : lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 0;
        if (length == 0 || i + length > text.size()) fail("bytes that are no UTF-8");
        for (size_t j = 1; j < length; ++j) {
          if ((static_cast<unsigned char>(text[i + j]) & 0xc0) != 0x80) fail("bytes that are no UTF-8");
        }
        i += length;
      }
      return text;
    }
  };

  std::string text_;
  double number_ = 0;
  std::vector<Json> items_;
  std::map<std::string, Json> members_;
};

}  // namespace fusewire::testing
