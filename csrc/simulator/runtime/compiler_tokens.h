// Preprocessed MSL as tokens that know which line of the original source they come from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sim {

enum class TokenKind { Identifier, Number, String, Punctuation, Directive };

struct Token {
  TokenKind kind;
  bool is_user_text;             // false inside headers of the compiler
  std::string_view text;
  uint32_t offset;               // in the text
  uint32_t file, line, column;   // of the original source; line and column start at 1
  int32_t partner = -1;          // the token that closes or opens this bracket

  bool is(std::string_view spelling) const { return text == spelling; }
  uint32_t end() const { return offset + static_cast<uint32_t>(text.size()); }
};

struct Tokens {
  std::vector<Token> list;
  std::vector<std::string> files;
  bool is_balanced = true;       // every bracket has a partner

  size_t size() const { return list.size(); }
  const Token& operator[](size_t i) const { return list[i]; }
  // Never out of range: a token that is nothing stands before the first and after the last.
  const Token& at(std::ptrdiff_t i) const;
  // "program_source:12:3"
  std::string position(const Token& token) const;
};

// `text` must outlive the result.
Tokens tokenize(std::string_view text);

}  // namespace sim
