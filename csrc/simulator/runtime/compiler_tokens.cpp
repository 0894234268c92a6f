#include "compiler_tokens.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

namespace sim {
namespace {

bool starts_identifier(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) || c == '_';
}
bool continues_identifier(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
}

class Tokenizer {
 public:
  explicit Tokenizer(std::string_view text) : text_(text) {
    tokens_.files.emplace_back("program_source");
  }

  Tokens run() {
    while (skip_blanks(), at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '#' && is_line_start_) {
        read_directive();
      } else if (starts_identifier(c)) {
        add(TokenKind::Identifier, identifier_end(at_));
      } else if (std::isdigit(static_cast<unsigned char>(c)) ||
                 (c == '.' && at_ + 1 < text_.size() &&
                  std::isdigit(static_cast<unsigned char>(text_[at_ + 1])))) {
        add(TokenKind::Number, number_end());
      } else if (c == '"' || c == '\'') {
        add(TokenKind::String, string_end(c));
      } else {
        add(TokenKind::Punctuation, at_ + punctuation_length());
      }
    }
    if (!open_.empty()) tokens_.is_balanced = false;
    return std::move(tokens_);
  }

 private:
  void skip_blanks() {
    for (; at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])); ++at_) {
      if (text_[at_] == '\n') new_line();
    }
  }

  void new_line() {
    ++line_;
    line_start_ = at_ + 1;
    is_line_start_ = true;
  }

  size_t identifier_end(size_t i) const {
    while (i < text_.size() && continues_identifier(text_[i])) ++i;
    return i;
  }

  size_t number_end() const {
    size_t i = at_ + 1;
    for (; i < text_.size(); ++i) {
      const char c = text_[i], before = text_[i - 1];
      const bool is_exponent_sign = (c == '+' || c == '-') && (before == 'e' || before == 'E' ||
                                                               before == 'p' || before == 'P');
      if (!continues_identifier(c) && c != '.' && !is_exponent_sign) break;
    }
    return i;
  }

  size_t string_end(char quote) const {
    size_t i = at_ + 1;
    while (i < text_.size() && text_[i] != quote && text_[i] != '\n') i += text_[i] == '\\' ? 2 : 1;
    return std::min(i + 1, text_.size());
  }

  size_t punctuation_length() const {
    // '>' stays single, so that it can close template arguments.
    for (std::string_view two : {"::", "->", "&&", "||", "==", "!=", "<=", "+=", "-=", "*=", "/=",
                                 "%=", "&=", "|=", "^=", "++", "--"}) {
      if (text_.substr(at_, 2) == two) return 2;
    }
    return 1;
  }

  // Line markers of the preprocessor: # 12 "file" flags, where flag 3 is a header of the compiler.
  void read_directive() {
    const size_t end = std::min(text_.find('\n', at_), text_.size());
    const std::string line(text_.substr(at_, end - at_));
    size_t i = line.find_first_not_of(" \t", 1);
    if (i != std::string::npos && std::isdigit(static_cast<unsigned char>(line[i]))) {
      char* rest = nullptr;
      line_ = static_cast<uint32_t>(std::strtoul(line.c_str() + i, &rest, 10)) - 1;
      const size_t open = line.find('"'), close = line.rfind('"');
      if (open != std::string::npos && close > open) {
        select_file(line.substr(open + 1, close - open - 1));
        is_user_text_ = line.find(" 3", close) == std::string::npos;
      }
      at_ = end;
    } else {
      add(TokenKind::Directive, end);
    }
  }

  void select_file(const std::string& name) {
    for (file_ = 0; file_ < tokens_.files.size(); ++file_) {
      if (tokens_.files[file_] == name) return;
    }
    tokens_.files.push_back(name);
  }

  void add(TokenKind kind, size_t end) {
    const auto column = static_cast<uint32_t>(at_ - line_start_ + 1);
    tokens_.list.push_back({kind, is_user_text_, text_.substr(at_, end - at_),
                            static_cast<uint32_t>(at_), file_, line_, column});
    if (kind == TokenKind::Punctuation) pair_brackets();
    at_ = end;
    is_line_start_ = false;
  }

  void pair_brackets() {
    const auto here = static_cast<int32_t>(tokens_.list.size()) - 1;
    Token& token = tokens_.list[here];
    const char c = token.text[0];
    if (c == '(' || c == '[' || c == '{') {
      open_.push_back(here);
    } else if (c == ')' || c == ']' || c == '}') {
      const char opening = c == ')' ? '(' : c == ']' ? '[' : '{';
      if (open_.empty() || tokens_.list[open_.back()].text[0] != opening) {
        tokens_.is_balanced = false;
        return;
      }
      token.partner = open_.back();
      tokens_.list[open_.back()].partner = here;
      open_.pop_back();
    }
  }

  std::string_view text_;
  Tokens tokens_;
  std::vector<int32_t> open_;
  size_t at_ = 0, line_start_ = 0;
  uint32_t file_ = 0, line_ = 1;
  bool is_line_start_ = true, is_user_text_ = true;
};

}  // namespace

const Token& Tokens::at(std::ptrdiff_t i) const {
  static const Token nothing{TokenKind::Punctuation, false, "", 0, 0, 0, 0};
  return i < 0 || i >= static_cast<std::ptrdiff_t>(list.size()) ? nothing : list[i];
}

std::string Tokens::position(const Token& token) const {
  return files[token.file] + ":" + std::to_string(token.line) + ":" + std::to_string(token.column);
}

Tokens tokenize(std::string_view text) {
  return Tokenizer(text).run();
}

}  // namespace sim
