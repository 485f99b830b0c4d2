# Runs one notebook cell written in R: reads its inputs, evaluates its source, writes what comes
# back.
#
#     Rscript harness.R MANIFEST
#
# MANIFEST is the manifest.json of a run's folder. Next to it lie inputs/ (one file per input),
# outputs/ (where value and display files go), work/ (the cell's working folder) and, at the end,
# result.json. Exit code 0 means that result.json was written, also when the cell failed; 1 that
# it could not be written; 2 that the manifest is no manifest. The reasons are on stderr.
#
# Of packages only jsonlite is needed to start. Tables also need arrow or nanoarrow, which are
# loaded when a cell first meets a table.
#
# Sections, each built on the ones above it:
#
#     A room of its own        the environment that keeps this code apart from the cell's
#     State                    what one run remembers
#     Text                     valid UTF-8, calls and conditions as text, SHA-256
#     JSON: writing            what R and Python both read back unchanged
#     JSON: reading            dicts, lists and numbers as R's lists and vectors
#     64-bit integers          in a language that has none
#     Arrow: columns           R vectors as Arrow columns and back, whatever package does the I/O
#     Arrow: nanoarrow         tables through nanoarrow
#     Arrow: arrow             tables through arrow
#     Arrow: tables            data frames, row names and R's attributes; tensors and scalars
#     The outputs folder       file names and files
#     Values                   which format a value gets; reading inputs, writing variables
#     Plots                    the PNG device that opens when a cell first draws
#     The cell                 bindings, quit(), evaluating, warnings, errors and their calls
#     The run                  from manifest.json to result.json
#     Main                     the command line

# --------------------------------------------------------------------------------------------
# A room of its own
# --------------------------------------------------------------------------------------------
# Rscript evaluates this file in the global environment, which is the cell's: there rm(list =
# ls()) or a variable named `c` would break the harness. So the first thing it does is to read
# itself again into an environment that sees nothing but base R. main() ends the process there;
# the rest of the file is read in the global environment only if something jumped past it.

if (identical(environment(), globalenv())) {
  local({
    path <- sub("^--file=", "", grep("^--file=", commandArgs(), value = TRUE)[[1]])
    path <- gsub("~+~", " ", path, fixed = TRUE) # how Rscript passes a space
    sys.source(path, envir = new.env(parent = baseenv()), keep.source = FALSE)
  })
  cat("strata: the cell jumped out of its harness\n", file = stderr())
  base::quit(save = "no", status = 1L, runLast = FALSE)
}

# --------------------------------------------------------------------------------------------
# State
# --------------------------------------------------------------------------------------------

run <- new.env(parent = emptyenv())
run$pid <- Sys.getpid()
run$quit <- base::quit # kept: the cell's own is another one
run$options <- NULL # as they were before the cell
run$ctype <- NULL # a locale with UTF-8
run$folder <- NULL # absolute; holds manifest.json
run$devices <- 0L # PNG devices opened so far
run$line <- NULL # of the cell's expression that is being evaluated
run$depth <- 0L # how many of the calls on the stack are the harness's
run$calls <- list() # the stack when the cell failed

ERROR_CHARS <- 200000L

# --------------------------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------------------------

# A locale without UTF-8 would turn every other letter into an escape on the console.
use_utf8 <- function() {
  for (name in c(run$ctype, Sys.getlocale("LC_CTYPE"), "C.UTF-8", "en_US.UTF-8", "UTF-8")) {
    suppressWarnings(Sys.setlocale("LC_CTYPE", name))
    if (isTRUE(l10n_info()[["UTF-8"]])) break
  }
  run$ctype <- Sys.getlocale("LC_CTYPE")
}

# Any text as valid UTF-8; bytes that are none show as <ff>.
printable <- function(text) {
  text <- as.character(text)
  bad <- !is_valid(text)
  Encoding(text[bad]) <- "UTF-8"
  text[bad] <- iconv(text[bad], "UTF-8", "UTF-8", sub = "byte")
  enc2utf8(text)
}

# enc2utf8() would make text of what is none.
is_valid <- function(text) is.na(text) | Encoding(text) != "bytes" & validEnc(text)
is_text <- function(text) all(is_valid(text))

shortened <- function(text) {
  if (nchar(text) <= ERROR_CHARS) return(text)
  half <- ERROR_CHARS %/% 2L
  paste0(
    substr(text, 1L, half), "\n... ", nchar(text) - 2L * half, " characters left out ...\n",
    substr(text, nchar(text) - half + 1L, nchar(text))
  )
}

class_name <- function(value) {
  if (isS4(value) || is.object(value)) class(value)[[1]] else typeof(value)
}

call_text <- function(call) {
  lines <- tryCatch(deparse(call, width.cutoff = 120L, nlines = 2L), error = function(e) "?")
  paste0(trimws(lines[[1]]), if (length(lines) > 1L) " ...")
}

message_of <- function(condition) {
  text <- tryCatch(conditionMessage(condition), error = function(e) "")
  if (!length(text)) text <- ""
  printable(paste(text, collapse = "\n"))
}

# As R prints it: "Error in f(1) : boom", or "Error: boom" where no call is to blame.
error_text <- function(condition) {
  call <- tryCatch(conditionCall(condition), error = function(e) NULL)
  where <- if (is.null(call)) "Error: " else paste0("Error in ", printable(call_text(call)), " : ")
  shortened(paste0(where, message_of(condition)))
}

note <- function(...) cat("strata: ", printable(paste0(...)), "\n", sep = "", file = stderr())

# SHA-256 of a string's UTF-8 bytes. Base R has none before 4.5. Words are 32 logicals, highest
# bit first, because R's integers cannot hold 0x80000000.
POWERS <- 2^(31:0)
as_word <- function(number) (number %/% POWERS) %% 2 == 1
rotated <- function(word, by) word[c((33L - by):32L, 1L:(32L - by))]
shifted <- function(word, by) c(logical(by), word[1L:(32L - by)])
total <- function(...) as_word(sum(vapply(list(...), function(w) sum(w * POWERS), 0)) %% 2^32)

sha256 <- function(text) {
  primes <- Filter(function(n) all(n %% 2:max(2, n - 1) != 0 | 2:max(2, n - 1) == n), 2:311)
  constants <- lapply(floor((primes^(1 / 3) %% 1) * 2^32), as_word)
  state <- lapply(floor((sqrt(primes[1:8]) %% 1) * 2^32), as_word)
  bytes <- charToRaw(enc2utf8(text))
  size <- 8 * length(bytes)
  bytes <- c(bytes, as.raw(128), raw((55 - length(bytes)) %% 64))
  bytes <- c(as.integer(bytes), as.integer((size %/% 256^(7:0)) %% 256))
  for (block in split(bytes, (seq_along(bytes) - 1L) %/% 64L)) {
    state <- Map(total, state, sha256_block(block, state, constants))
  }
  paste(sprintf("%04x", unlist(lapply(state, function(word) {
    c(sum(word[1:16] * 2^(15:0)), sum(word[17:32] * 2^(15:0)))
  }))), collapse = "")
}

sha256_block <- function(block, state, constants) {
  w <- lapply(1:16, function(i) as_word(sum(block[4L * i - 3:0] * 256^(3:0))))
  for (i in 17:64) {
    a <- w[[i - 15L]]
    b <- w[[i - 2L]]
    a <- xor(xor(rotated(a, 7L), rotated(a, 18L)), shifted(a, 3L))
    b <- xor(xor(rotated(b, 17L), rotated(b, 19L)), shifted(b, 10L))
    w[[i]] <- total(w[[i - 16L]], a, w[[i - 7L]], b)
  }
  for (i in 1:64) {
    a <- state[[1]]
    e <- state[[5]]
    choice <- xor(e & state[[6]], !e & state[[7]])
    majority <- xor(xor(a & state[[2]], a & state[[3]]), state[[2]] & state[[3]])
    e <- xor(xor(rotated(e, 6L), rotated(e, 11L)), rotated(e, 25L))
    a <- xor(xor(rotated(a, 2L), rotated(a, 13L)), rotated(a, 22L))
    step <- total(state[[8]], e, choice, constants[[i]], w[[i]])
    state <- c(list(total(step, a, majority)), state[1:3], list(total(state[[4]], step)), state[5:7])
  }
  state
}

# --------------------------------------------------------------------------------------------
# JSON: writing
# --------------------------------------------------------------------------------------------
# A value becomes JSON only if a Python cell gets a sensible value and an R cell gets the same
# value back. Two conventions make that work for more than a few values:
#
#   - a double always has a point or an exponent (1.0), an integer never;
#   - JSON has arrays where R has both vectors and lists, and objects where R has both named
#     lists and named vectors. `[1.0,2.0]` is the vector and `{"a":1.0}` the list, as an R user
#     expects of a Python list or dict. A space after the bracket, which no other reader
#     notices, says that it is the other one: `[ 1.0,2.0]` a list, `{ "a":1.0}` a named vector.

not_json <- function() stop("not JSON")

json_strings <- function(text) {
  if (!is_text(text)) not_json()
  text <- enc2utf8(text)
  missing <- is.na(text)
  odd <- grepl("[\\\\\"\001-\037\177]", text)
  if (any(odd)) {
    plain <- gsub("([\\\\\"])", "\\\\\\1", text[odd], perl = TRUE)
    for (code in c(1:31, 127L)) {
      plain <- gsub(intToUtf8(code), sprintf("\\u%04x", code), plain, fixed = TRUE)
    }
    text[odd] <- plain
  }
  text <- paste0("\"", text, "\"")
  text[missing] <- "null"
  text
}

# The fewest digits that give the number back to a reader that rounds correctly, as Python and
# jsonlite do (R's own as.numeric() does not always). Of many numbers, 15 digits or 17.
json_doubles <- function(numbers) {
  text <- sprintf("%.15g", numbers)
  finite <- which(is.finite(numbers))
  wrong <- finite
  for (format in c(if (length(numbers) < 1e4) "%.16g", "%.17g")) {
    if (all(numbers[wrong] == trunc(numbers[wrong]) & abs(numbers[wrong]) < 1e15)) break
    array <- paste0("[", paste(text[wrong], collapse = ","), "]")
    wrong <- wrong[as.double(unlist(jsonlite::parse_json(array))) != numbers[wrong]]
    text[wrong] <- sprintf(format, numbers[wrong])
  }
  whole <- finite[!grepl("[.e]", text[finite])]
  text[whole] <- paste0(text[whole], ".0")
  if (length(finite) < length(numbers)) {
    text[is.na(numbers)] <- "null"
    text[is.nan(numbers)] <- "NaN"
    text[which(numbers == Inf)] <- "Infinity"
    text[which(numbers == -Inf)] <- "-Infinity"
  }
  text
}

json_atoms <- function(value) {
  switch(typeof(value),
    logical = c("false", "true", "null")[ifelse(is.na(value), 2L, value) + 1L],
    integer = if (anyNA(value)) sub("NA", "null", sprintf("%d", value)) else sprintf("%d", value),
    double = json_doubles(value),
    character = json_strings(value),
    not_json()
  )
}

# Records of the same keys come in thousands: the last ones are remembered.
json_members <- function(keys, items, open = "{") {
  if (!identical(keys, run$keys)) {
    if (anyNA(keys) || anyDuplicated(keys)) not_json()
    run$json_keys <- paste0(json_strings(keys), ":")
    run$keys <- keys
  }
  paste0(open, paste0(run$json_keys, items, collapse = ","), "}")
}

# The JSON of a value. Raises an error for one that JSON cannot give back.
json_of <- function(value) {
  if (is.null(value)) return("null")
  if (!is.null(attributes(value))) {
    if (is.object(value) || isS4(value)) not_json()
    if (!identical(names(attributes(value)), "names")) not_json()
  }
  if (is.list(value)) json_of_list(value) else json_of_vector(value)
}

json_of_vector <- function(value) {
  keys <- names(value)
  items <- json_atoms(unname(value))
  if (!length(items)) not_json() # [] is list()
  # Nulls alone are a logical vector: NA_real_ and its kin would come back as NA.
  if (all(items == "null") && (typeof(value) != "logical" || is.null(keys) && length(items) == 1L)) {
    not_json()
  }
  if (!is.null(keys)) return(json_members(keys, items, "{ "))
  if (length(items) == 1L) items else paste0("[", paste(items, collapse = ","), "]")
}

json_of_list <- function(value) {
  items <- vapply(unname(value), json_of, "")
  if (!is.null(names(value))) return(if (length(items)) json_members(names(value), items) else "{}")
  if (length(items)) paste0("[ ", paste(items, collapse = ","), "]") else "[]"
}

# What the strings of a JSON text hold is none of its syntax: PCRE skips them.
outside_strings <- function(pattern) paste0("\"(?:[^\"\\\\]++|\\\\.)*+\"(*SKIP)(*F)|", pattern)

# result.json goes on to readers of strict JSON, which has no NaN.
strict <- function(json) {
  if (!grepl("NaN|Infinity", json)) return(json)
  gsub(outside_strings("NaN|-?Infinity"), "null", json, perl = TRUE)
}

# JSON text as part of a larger one.
as_json <- function(text) structure(text, class = "strata_json")

# The JSON of a report made of lists, scalars and as_json() text.
report_json <- function(value) {
  if (inherits(value, "strata_json")) return(unclass(value))
  if (is.null(value)) return("null")
  if (is.character(value)) return(json_strings(printable(value)))
  if (is.double(value)) return(sprintf("%.0f", value)) # sizes and counts
  if (!is.list(value)) return(json_atoms(value))
  items <- vapply(unname(value), report_json, "")
  if (is.null(names(value))) return(paste0("[", paste(items, collapse = ", "), "]"))
  paste0("{", paste0(json_strings(printable(names(value))), ": ", items, collapse = ", "), "}")
}

no_members <- function() as_json("{}")

# --------------------------------------------------------------------------------------------
# JSON: reading
# --------------------------------------------------------------------------------------------

EXACT_DOUBLES <- 2^53

read_text <- function(path) {
  text <- readChar(path, file.size(path), useBytes = TRUE)
  if (!length(text)) return("")
  Encoding(text) <- "UTF-8"
  if (!validUTF8(text)) stop("it is not UTF-8")
  text
}

read_json <- function(path, name = "") read_json_text(read_text(path), name)

# jsonlite knows neither NaN nor integers past 2^53, and forgets the spaces that tell a list
# from a vector. All of these are first put into strings that start with a mark.
read_json_text <- function(text, name = "") {
  refuse_escapes(text)
  mark <- "\uE000"
  while (grepl(mark, text, fixed = TRUE)) mark <- paste0(mark, "\uE001")
  number <- "(?<![\\d.eE+-])(-?\\d{16,}(?![\\d.eE])|NaN|-?Infinity)"
  marked <- text
  if (grepl("NaN|Infinity|[0-9]{16}", text)) {
    marked <- gsub(outside_strings(number), paste0("\"", mark, "\\1\""), marked, perl = TRUE)
  }
  if (grepl("[ ", text, fixed = TRUE)) {
    marked <- gsub(outside_strings("\\[ (?!\\s*\\])"), paste0("[\"", mark, "\","), marked, perl = TRUE)
  }
  if (grepl("{ ", text, fixed = TRUE)) {
    pattern <- outside_strings("\\{ (?!\\s*\\})")
    marked <- gsub(pattern, paste0("{\"", mark, "\":null,"), marked, perl = TRUE)
  }
  tree <- jsonlite::parse_json(marked)
  from_json(tree, if (identical(marked, text)) NULL else mark, name)
}

# jsonlite would cut a string at its NUL, and put a question mark for half a surrogate pair.
refuse_escapes <- function(text) {
  if (!grepl("\\\\u(0000|[dD][89a-fA-F])", text)) return()
  escape <- "(?<!\\\\)(?:\\\\\\\\)*\\\\u"
  lone <- "(?:[dD][89abAB]..(?!\\\\u[dD][c-fC-F])|(?<!\\\\u[dD][89abAB]..\\\\u)[dD][c-fC-F]..)"
  if (grepl(paste0(escape, "(?:0000|", lone, ")"), text, perl = TRUE)) {
    stop("it holds a NUL or half a character (a lone surrogate), which R's strings cannot")
  }
}

from_json <- function(tree, mark, name) {
  if (!is.list(tree)) return(from_json_atom(tree, mark, name))
  keys <- names(tree)
  other <- !is.null(mark) && length(tree) > 0L &&
    if (is.null(keys)) identical(tree[[1]], mark) else identical(keys[[1]], mark)
  if (other) tree <- tree[-1L]
  as_list <- if (is.null(keys)) other else !other
  if (!is.null(mark) || any(vapply(tree, is.list, NA))) {
    tree <- lapply(tree, from_json, mark = mark, name = name)
  }
  if (as_list || !length(tree)) tree else as_vector(tree)
}

from_json_atom <- function(atom, mark, name) {
  if (is.null(mark) || !is.character(atom) || !startsWith(atom, mark)) return(atom)
  text <- substring(atom, nchar(mark) + 1L)
  switch(text, `NaN` = NaN, Infinity = Inf, `-Infinity` = -Inf, large_integer(text, name))
}

large_integer <- function(text, name) {
  number <- as.numeric(text)
  if (abs(number) < EXACT_DOUBLES || sprintf("%.0f", number) == text) return(number)
  if (abs(number) < 2^63 && requireNamespace("bit64", quietly = TRUE)) {
    return(bit64::as.integer64(text))
  }
  note("input '", name, "': ", text, " is rounded: R has no integer of that size without bit64")
  number
}

# A list of like scalars and NULLs as a vector with NAs; any other list as it is.
as_vector <- function(items) {
  kinds <- vapply(items, typeof, "")
  null <- kinds == "NULL"
  kind <- unique(kinds[!null])
  if (any(lengths(items)[!null] != 1L) || "list" %in% kind) return(items)
  if (length(kind) > 1L && !all(kind %in% c("integer", "double"))) return(items)
  items[null] <- NA
  if (!any(vapply(items, inherits, NA, "integer64"))) return(unlist(items))
  whole <- vapply(items, function(item) is.object(item) || is.na(item) || item == floor(item), NA)
  if (all(whole)) do.call(c, lapply(items, bit64::as.integer64)) else items
}

# --------------------------------------------------------------------------------------------
# 64-bit integers
# --------------------------------------------------------------------------------------------
# R keeps them, as bit64 does, in the eight bytes of a double. Here they are taken apart into
# doubles that hold the upper (signed) and the lower (unsigned) 32 bits, which needs no bit64.

int64_parts <- function(bits) {
  words <- readBin(writeBin(as.vector(unclass(bits)), raw(), endian = "little"),
    "integer", 2L * length(bits), endian = "little")
  words <- as.double(words)
  words[is.na(words)] <- -2^31
  low <- every_other(words, 1L)
  list(high = every_other(words, 2L), low = low + 2^32 * (low < 0))
}

every_other <- function(x, first) x[seq.int(first, by = 2L, length.out = length(x) %/% 2L)]

int64_bits <- function(high, low) {
  words <- as.vector(rbind(low - 2^32 * (low >= 2^31), high))
  words <- suppressWarnings(as.integer(words)) # -2^31 becomes NA, which has just those bits
  bits <- readBin(writeBin(words, raw(), endian = "little"), "double", length(high),
    endian = "little")
  structure(bits, class = "integer64")
}

int64_is_na <- function(parts) parts$high == -2^31 & parts$low == 0

# Whole doubles below 2^53; NA stays NA.
int64_of <- function(numbers) {
  high <- floor(numbers / 2^32)
  int64_or_na(high, numbers - high * 2^32, is.na(numbers))
}

int64_or_na <- function(high, low, missing) {
  high[missing] <- -2^31
  low[missing] <- 0
  int64_bits(high, low)
}

# As the smallest R type that holds them all: integer, else integer64, else double.
int64_values <- function(bits, about, unsigned = FALSE) {
  parts <- int64_parts(bits)
  missing <- int64_is_na(parts)
  high <- parts$high + 2^32 * (unsigned & parts$high < 0)
  values <- high * 2^32 + parts$low
  values[missing] <- NA
  largest <- suppressWarnings(max(abs(values), 0, na.rm = TRUE))
  if (largest < 2^31) return(as.integer(values))
  fits <- all(missing | high == parts$high)
  if (fits && requireNamespace("bit64", quietly = TRUE)) return(structure(bits, class = "integer64"))
  if (largest >= EXACT_DOUBLES) {
    note(about, " holds 64-bit integers that are rounded: R keeps them only with the package bit64",
      if (!fits) ", and unsigned ones not at all")
  }
  as.numeric(values)
}

# A count of `unit`ths of a second as seconds, by long division, since the count can exceed 2^53.
int64_seconds <- function(bits, unit) {
  parts <- int64_parts(bits)
  whole <- floor(parts$high / unit)
  rest <- parts$high - whole * unit
  for (digit in list(parts$low %/% 65536, parts$low %% 65536)) {
    part <- rest * 65536 + digit
    whole <- whole * 65536 + floor(part / unit)
    rest <- part %% unit
  }
  seconds <- whole + rest / unit
  seconds[int64_is_na(parts)] <- NA
  seconds
}

# And back: seconds as a count of nanoseconds. The products stay below 2^53.
int64_nanoseconds <- function(seconds) {
  missing <- is.na(seconds)
  seconds[missing] <- 0
  whole <- floor(seconds)
  upper <- floor(whole / 65536) * 1e9
  lower <- (whole %% 65536) * 1e9 + round((seconds - whole) * 1e9)
  rest <- (upper %% 65536) * 65536 + lower
  high <- floor(upper / 65536) + floor(rest / 2^32)
  int64_or_na(high, rest %% 2^32, missing)
}

# --------------------------------------------------------------------------------------------
# Arrow: columns
# --------------------------------------------------------------------------------------------
# Between R and either package stands a plain description of a column, list(type, values, ...):
#
#     bool int32 double string uint8    values: a bare R vector
#     date32                            values: whole days
#     int64 timestamp duration time64   values: int64 bits; with `unit` (s, ms, us, ns) and `tz`
#     dictionary                        values: a bare factor
#     binary                            values: a list of raw vectors and NULLs
#     list                              values: a list of vectors and NULLs; with `item`, the
#                                       description of all their elements in a row
#
# A column that Arrow cannot give back exactly raises not_arrow(), and its frame becomes .rds.

UNITS <- c(s = 1, ms = 1e3, us = 1e6, ns = 1e9)
DIFFTIME_SECONDS <- c(secs = 1, mins = 60, hours = 3600, days = 86400, weeks = 604800)

not_arrow <- function() stop("not Arrow")

bare <- function(x) {
  attributes(x) <- NULL
  x
}

same_numbers <- function(a, b) all(is.na(a) == is.na(b)) && all(a == b, na.rm = TRUE)

column_of <- function(x) {
  if (!is.null(dim(x)) || isS4(x) || inherits(x, "POSIXlt")) not_arrow()
  if (is.factor(x)) return(factor_column(x))
  if (inherits(x, "integer64")) return(list(type = "int64", values = bare(x)))
  column <- if (inherits(x, "Date")) date_column(x)
    else if (inherits(x, "POSIXct")) timestamp_column(x)
    else if (inherits(x, "difftime")) duration_column(x)
  if (is.null(column)) bare_column(bare(x)) else column
}

# NULL, from here on, is for values that only their bare numbers keep exactly.
date_column <- function(x) {
  days <- bare(x)
  whole <- is.na(days) & !is.nan(days) | is.finite(days) & days == floor(days) & abs(days) < 2^31
  if (all(whole)) list(type = "date32", values = as.integer(days))
}

timestamp_column <- function(x) {
  tz <- attr(x, "tzone")
  tz <- if (length(tz) && nzchar(tz[[1]])) tz[[1]] else local_zone()
  column <- count_of_seconds(as.double(bare(x)), "timestamp")
  # A zone that only R knows would make the whole table unreadable to pandas.
  known <- suppressWarnings(OlsonNames())
  if (!is.null(column)) c(column, tz = if (tz %in% known || !length(known)) tz else "UTC")
}

duration_column <- function(x) {
  factor <- DIFFTIME_SECONDS[[attr(x, "units")]]
  seconds <- as.double(bare(x)) * factor
  clock <- inherits(x, "hms") && all(seconds >= 0 & seconds < 86400, na.rm = TRUE)
  column <- count_of_seconds(seconds, if (clock) "time64" else "duration")
  if (!is.null(column) && same_numbers(seconds / factor, as.double(bare(x)))) column
}

count_of_seconds <- function(seconds, type) {
  if (any(is.nan(seconds) | is.infinite(seconds))) return(NULL)
  micros <- round(seconds * 1e6)
  if (all(abs(micros) < EXACT_DOUBLES, na.rm = TRUE)) {
    bits <- int64_of(micros)
    if (same_numbers(int64_seconds(bits, 1e6), seconds)) {
      return(list(type = type, values = bits, unit = "us"))
    }
  }
  if (any(abs(seconds) > 9.2e9, na.rm = TRUE)) return(NULL)
  bits <- int64_nanoseconds(seconds)
  if (same_numbers(int64_seconds(bits, 1e9), seconds)) list(type = type, values = bits, unit = "ns")
}

factor_column <- function(x) {
  if (!is_text(levels(x)) || anyNA(levels(x))) not_arrow()
  list(type = "dictionary", values = factor(levels(x)[bare(x)], levels(x)))
}

bare_column <- function(x) {
  switch(typeof(x),
    logical = list(type = "bool", values = x),
    integer = list(type = "int32", values = x),
    double = list(type = "double", values = x),
    character = if (is_text(x)) list(type = "string", values = enc2utf8(x)) else not_arrow(),
    raw = list(type = "uint8", values = x),
    list = list_column(x),
    not_arrow()
  )
}

list_column <- function(x) {
  kinds <- unique(vapply(x, typeof, ""))
  kind <- setdiff(kinds, "NULL")
  if (length(kind) != 1L) not_arrow()
  if (kind == "raw") return(list(type = "binary", values = x))
  plain <- all(vapply(x, function(item) is.null(attributes(item)), NA))
  if (!plain || !kind %in% c("logical", "integer", "double", "character")) not_arrow()
  list(type = "list", values = x, item = bare_column(unlist(x, use.names = FALSE)))
}

# The R vector of a column that was read: the values by the meaning of their type. `about` names
# the column where something has to be said of it.
vector_of <- function(column, about) {
  values <- column$values
  switch(column$type,
    int64 = int64_values(values, about),
    uint64 = int64_values(values, about, unsigned = TRUE),
    date32 = structure(as.double(values), class = "Date"),
    date64 = structure(floor(int64_seconds(values, 1e3) / 86400), class = "Date"),
    timestamp = structure(
      instants(values, column$unit, about),
      class = c("POSIXct", "POSIXt"), tzone = zone_of(column$tz)
    ),
    duration = structure(
      int64_seconds(values, UNITS[[column$unit]]), class = "difftime", units = "secs"
    ),
    time64 = clock_time(int64_seconds(values, UNITS[[column$unit]])),
    time32 = clock_time(values / UNITS[[column$unit]]),
    values
  )
}

instants <- function(bits, unit, about) {
  seconds <- int64_seconds(bits, UNITS[[unit]])
  if (unit == "ns" && !identical(bare(int64_nanoseconds(seconds)), bare(bits)) &&
    !same_numbers(round(seconds * 1e6), int64_seconds(bits, 1e3))) {
    note(about, " holds nanoseconds that are rounded: R keeps times to about 0.2 microseconds")
  }
  seconds
}

clock_time <- function(seconds) {
  known <- requireNamespace("hms", quietly = TRUE)
  structure(seconds, class = c(if (known) "hms", "difftime"), units = "secs")
}

# R has no times without a zone: such a one is shown as it is in UTC. Nor does it know an offset
# as a zone, except a whole hour's, whose sign is the other way round.
zone_of <- function(tz) {
  if (is.null(tz) || !nzchar(tz)) return("UTC")
  if (!grepl("^[+-][0-9]{2}:?[0-9]{2}$", tz)) return(tz)
  if (!grepl("00$", tz) || grepl("^[+-]00", tz)) return("UTC")
  paste0("Etc/GMT", if (startsWith(tz, "+")) "-" else "+", as.integer(substr(tz, 2L, 3L)))
}

# Not Sys.timezone(), which may run a program that writes to the cell's console.
local_zone <- function() {
  if (nzchar(Sys.getenv("TZ"))) return(sub("^:", "", Sys.getenv("TZ")))
  link <- Sys.readlink("/etc/localtime")
  if (isTRUE(grepl("zoneinfo/", link))) sub(".*zoneinfo/", "", link) else "UTC"
}

# --------------------------------------------------------------------------------------------
# Arrow: nanoarrow
# --------------------------------------------------------------------------------------------

nano_write <- function(columns, metadata, path) {
  arrays <- lapply(columns, nano_array)
  schema <- nanoarrow::na_struct(lapply(arrays, nanoarrow::infer_nanoarrow_schema))
  schema$metadata <- metadata
  size <- if (length(arrays)) arrays[[1]]$length else 0L
  batch <- nano_build(schema, size, NULL, children = arrays)
  connection <- file(path, "wb")
  on.exit(close(connection))
  nanoarrow::write_nanoarrow(nanoarrow::basic_array_stream(list(batch)), connection)
}

nano_build <- function(schema, size, valid, ..., children = NULL) {
  bitmap <- if (!is.null(valid) && !all(valid)) {
    nanoarrow::as_nanoarrow_array(valid, schema = nanoarrow::na_bool())$buffers[[2]]
  }
  parts <- list(
    length = size, null_count = if (is.null(bitmap)) 0L else sum(!valid),
    buffers = c(list(bitmap), list(...))
  )
  if (!is.null(children)) parts$children <- children
  nanoarrow::nanoarrow_array_modify(nanoarrow::nanoarrow_array_init(schema), parts)
}

# nanoarrow's own conversion takes NaN for NA and cannot write dictionaries: a factor's labels
# go as strings, and R's own attributes make it a factor again.
nano_array <- function(column) {
  x <- column$values
  size <- length(x)
  switch(column$type,
    bool = nanoarrow::as_nanoarrow_array(x, schema = nanoarrow::na_bool()),
    int32 = nano_build(nanoarrow::na_int32(), size, !is.na(x), x),
    double = nano_build(nanoarrow::na_double(), size, !is.na(x) | is.nan(x), x),
    string = nanoarrow::as_nanoarrow_array(x, schema = nanoarrow::na_string()),
    dictionary = nanoarrow::as_nanoarrow_array(as.character(x), schema = nanoarrow::na_string()),
    uint8 = nano_build(nanoarrow::na_uint8(), size, NULL, x),
    date32 = nano_build(nanoarrow::na_date32(), size, !is.na(x), x),
    binary = nano_build(
      nanoarrow::na_binary(), size, !nulls(x), offsets(x), as.raw(unlist(x))
    ),
    list = {
      item <- nano_array(column$item)
      schema <- nanoarrow::infer_nanoarrow_schema(item)
      schema$name <- "item"
      schema <- nanoarrow::na_list(schema)
      nano_build(schema, size, !nulls(x), offsets(x), children = list(item))
    },
    nano_build(
      switch(column$type,
        int64 = nanoarrow::na_int64(),
        timestamp = nanoarrow::na_timestamp(column$unit, column$tz),
        duration = nanoarrow::na_duration(column$unit),
        time64 = nanoarrow::na_time64(column$unit)
      ),
      size, !int64_is_na(int64_parts(x)), bare(x)
    )
  )
}

nulls <- function(items) vapply(items, is.null, NA)
offsets <- function(items) as.integer(c(0, cumsum(lengths(items))))

nano_read <- function(path, name) {
  stream <- tryCatch(nanoarrow::read_nanoarrow(path), error = nano_cannot)
  on.exit(stream$release())
  schema <- stream$get_schema()
  batches <- tryCatch(nanoarrow::collect_array_stream(stream, validate = FALSE), error = nano_cannot)
  columns <- lapply(seq_along(schema$children), function(i) {
    about <- paste0("input '", name, "': column '", names(schema$children)[[i]], "'")
    if (!length(batches)) batches <- list(nano_empty(schema))
    chunks <- lapply(batches, function(batch) nano_column(batch$children[[i]], about))
    column <- chunks[[1]]
    if (length(chunks) > 1L) column$values <- joined(lapply(chunks, `[[`, "values"))
    column
  })
  list(
    names = as.character(names(schema$children)), columns = columns, metadata = schema$metadata
  )
}

nano_empty <- function(schema) {
  nanoarrow::as_nanoarrow_array(
    nanoarrow::convert_array_stream(nanoarrow::basic_array_stream(list(), schema = schema)),
    schema = schema
  )
}

nano_cannot <- function(e) {
  message <- conditionMessage(e)
  if (grepl("Dictionary", message)) {
    stop("nanoarrow cannot read categorical (dictionary) columns: install the R package arrow, ",
      "or turn them into plain strings in the cell that makes the table", call. = FALSE)
  }
  if (grepl("ompression", message)) {
    stop("nanoarrow as built here cannot read a compressed table: install the R package arrow, ",
      "or nanoarrow with zstd (", message, ")", call. = FALSE)
  }
  stop("nanoarrow cannot read it (", message, "): install the R package arrow", call. = FALSE)
}

joined <- function(chunks) {
  if (is.data.frame(chunks[[1]])) return(do.call(rbind, chunks))
  do.call(c, chunks)
}

# One chunk of a column as the description above. Lists, binaries and structs are taken apart
# here: nanoarrow needs more packages for the former and fills the nulls of the latter.
nano_column <- function(array, about) {
  schema <- nanoarrow::infer_nanoarrow_schema(array)
  if (!is.null(schema$metadata[["ARROW:extension:name"]])) {
    schema$metadata <- list()
    array <- nanoarrow::nanoarrow_array_set_schema(array, schema)
  }
  parsed <- nanoarrow::nanoarrow_schema_parse(schema)
  type <- parsed$type
  as <- function(ptype) nanoarrow::convert_array(array, ptype)
  stored <- function(schema, ptype) {
    nanoarrow::convert_array(nanoarrow::nanoarrow_array_set_schema(array, schema), ptype)
  }
  int64 <- function() bare(stored(nanoarrow::na_int64(), structure(double(), class = "integer64")))
  values <- switch(type,
    bool = as(logical()),
    int8 = , int16 = , int32 = , uint8 = , uint16 = as(integer()),
    uint32 = , half_float = , float = , double = as(double()),
    string = , large_string = as(character()),
    int64 = , uint64 = , date64 = , timestamp = , duration = , time64 = int64(),
    date32 = , time32 = stored(nanoarrow::na_int32(), integer()),
    decimal32 = , decimal64 = , decimal128 = , decimal256 = decimals(as(character()), about),
    na = rep(NA, array$length),
    binary = , large_binary = , fixed_size_binary = nano_binary(array, parsed),
    list = , large_list = , fixed_size_list = , map = nano_list(array, parsed, about),
    struct = nano_struct(array, about),
    stop(about, " has a type that nanoarrow cannot read (", type, "): install the R package arrow",
      call. = FALSE)
  )
  list(type = type, values = values, unit = parsed$time_unit, tz = parsed$timezone)
}

nano_valid <- function(array) {
  bitmap <- array$buffers[[1]]
  if (array$null_count == 0L || length(bitmap) == 0L) return(rep(TRUE, array$length))
  nanoarrow::convert_buffer(bitmap)[array$offset + seq_len(array$length)]
}

# The first and the one-past-last index of each item, from zero.
nano_ranges <- function(array, parsed) {
  at <- array$offset + seq_len(array$length)
  if (!is.null(parsed$fixed_size)) {
    return(list(from = (at - 1L) * parsed$fixed_size, to = at * parsed$fixed_size))
  }
  bounds <- as.double(nanoarrow::convert_buffer(array$buffers[[2]]))
  list(from = bounds[at], to = bounds[at + 1L])
}

cut_up <- function(items, array, parsed) {
  ranges <- nano_ranges(array, parsed)
  take <- if (is.data.frame(items)) function(i) items[i, , drop = FALSE] else function(i) items[i]
  pieces <- Map(function(from, to) take(from + seq_len(to - from)), ranges$from, ranges$to)
  pieces[!nano_valid(array)] <- list(NULL)
  unname(pieces)
}

nano_binary <- function(array, parsed) {
  data <- array$buffers[[if (is.null(parsed$fixed_size)) 3L else 2L]]
  cut_up(as.raw(data), array, parsed)
}

nano_list <- function(array, parsed, about) {
  cut_up(vector_of(nano_column(array$children[[1]], about), about), array, parsed)
}

nano_struct <- function(array, about) {
  at <- array$offset + seq_len(array$length)
  valid <- nano_valid(array)
  columns <- lapply(array$children, function(child) {
    values <- vector_of(nano_column(child, about), about)[at]
    if (!all(valid)) values[!valid] <- if (is.list(values)) list(NULL) else NA
    values
  })
  as_frame(columns, names(array$children), array$length)
}

decimals <- function(text, about) {
  numbers <- as.numeric(text)
  scale <- max(0L, nchar(sub("^[^.]*[.]?", "", text)), na.rm = TRUE)
  if (!identical(sprintf(paste0("%.", scale, "f"), numbers[!is.na(text)]), text[!is.na(text)])) {
    note(about, " holds decimals that are rounded: R has only doubles")
  }
  numbers
}

# --------------------------------------------------------------------------------------------
# Arrow: arrow
# --------------------------------------------------------------------------------------------

pkg_write <- function(columns, metadata, path) {
  arrays <- if (length(columns)) lapply(columns, pkg_array) else list(data.frame())
  table <- do.call(arrow::Table$create, arrays)
  table$metadata <- metadata
  arrow::write_ipc_stream(table, path)
}

pkg_array <- function(column) {
  x <- column$values
  if (column$type == "date32") x <- structure(x, class = "Date")
  if (!column$type %in% c("int64", "timestamp", "duration", "time64")) {
    return(arrow::Array$create(x, type = pkg_type(column)))
  }
  counts <- arrow::Array$create(structure(x, class = "integer64"), type = arrow::int64())
  if (column$type == "int64") counts else counts$cast(pkg_type(column))
}

pkg_type <- function(column) {
  switch(column$type,
    bool = arrow::bool(),
    int32 = arrow::int32(),
    double = arrow::float64(),
    string = arrow::utf8(),
    uint8 = arrow::uint8(),
    date32 = arrow::date32(),
    timestamp = arrow::timestamp(column$unit, timezone = column$tz),
    duration = arrow::duration(column$unit),
    time64 = arrow::time64(column$unit),
    binary = arrow::binary(),
    list = arrow::list_of(pkg_type(column$item)),
    dictionary = NULL # of a factor arrow makes one by itself
  )
}

pkg_read <- function(path, name) {
  table <- arrow::read_ipc_stream(path, as_data_frame = FALSE)
  old <- options(arrow.int64_downcast = FALSE)
  on.exit(options(old))
  columns <- lapply(seq_len(table$num_columns), function(i) {
    about <- paste0("input '", name, "': column '", names(table)[[i]], "'")
    pkg_column(table$column(i - 1L), table$schema$field(i - 1L)$type, about)
  })
  list(
    names = as.character(names(table)), columns = columns, metadata = table$schema$metadata
  )
}

# `timestamp[us, tz=UTC]` and `duration[ns]` are how arrow names those types.
pkg_column <- function(chunks, type, about) {
  text <- type$ToString()
  kind <- sub("[^a-z0-9].*", "", text)
  unit <- sub("^[a-z0-9]+\\[([a-z]+).*", "\\1", text)
  tz <- if (grepl("tz=", text)) sub(".*tz=([^]]*)\\]$", "\\1", text)
  counted <- kind %in% c("timestamp", "duration", "time64", "int64", "uint64")
  values <- if (counted) pkg_int64(as.vector(chunks$cast(arrow::int64(), safe = FALSE)))
    else pkg_vector(chunks, kind, about)
  list(type = if (counted || kind == "dictionary") kind else "", values = values, unit = unit, tz = tz)
}

# Where as.vector() of arrow is not exact (or, for half floats, wrong), or gives more classes
# than R's own.
pkg_vector <- function(chunks, kind, about) {
  if (kind == "halffloat") return(as.vector(chunks$cast(arrow::float32())))
  if (startsWith(kind, "decimal")) return(decimals(as.vector(chunks$cast(arrow::utf8())), about))
  values <- as.vector(chunks)
  small <- function(x) if (inherits(x, "integer64")) int64_values(bare(x), about) else x
  if (is.data.frame(values)) {
    values <- as.data.frame(values)
    values[as.vector(is.na(chunks)), ] <- NA
    values[] <- lapply(values, small)
    values
  } else if (is.list(values)) {
    lapply(bare(values), small)
  } else if (kind == "null") {
    bare(values)
  } else {
    values
  }
}

pkg_int64 <- function(values) {
  if (inherits(values, "integer64")) bare(values) else bare(int64_of(as.double(values)))
}

# --------------------------------------------------------------------------------------------
# Arrow: tables
# --------------------------------------------------------------------------------------------
# What Arrow has no words for (a factor's levels and order, a class, a time without a zone,
# integer row names) rides along in the schema's metadata for R's own use, as a serialized list.
# Row names that are text become the index column of pandas.

R_FRAME <- "strata.r.frame"
INDEX <- "__index_level_0__"
PREVIEW_ROWS <- 20L

table_package <- function() {
  for (name in c("arrow", "nanoarrow")) {
    if (requireNamespace(name, quietly = TRUE)) return(name)
  }
  stop("tables need the R package arrow or nanoarrow, and neither is installed here", call. = FALSE)
}

as_frame <- function(columns, names, size) {
  structure(columns, names = names, row.names = .set_row_names(size), class = "data.frame")
}

write_table <- function(frame, path) {
  package <- table_package()
  rows <- attr(frame, "row.names")
  size <- length(rows)
  named <- is.character(rows)
  columns <- lapply(seq_along(frame), function(i) .subset2(frame, i))
  names(columns) <- frame_names(frame)
  kept <- r_frame(frame, columns, rows)
  if (named) columns[[INDEX]] <- rows
  described <- lapply(columns, column_of)
  sizes <- vapply(described, function(column) length(column$values), 0L)
  if (!length(columns) && size || any(sizes != size)) not_arrow()
  metadata <- list(strata.arrow.shape = "table")
  if (!is.null(kept)) metadata[[R_FRAME]] <- kept
  if (named) metadata$pandas <- pandas_metadata()
  (if (package == "arrow") pkg_write else nano_write)(described, metadata, path)
  list(
    rows = size, columns = as.list(names(columns)), preview = preview_rows(columns, size)
  )
}

frame_names <- function(frame) {
  names <- names(frame)
  if (anyNA(names) || !is_text(names) || anyDuplicated(c(names, INDEX))) not_arrow()
  enc2utf8(as.character(names))
}

r_frame <- function(frame, columns, rows) {
  attributes <- attributes(frame)
  attributes[c("names", "row.names", ".internal.selfref")] <- NULL
  kept <- lapply(columns, function(x) {
    if (!is.null(attributes(x)) || is.list(x) || is.raw(x)) {
      list(type = typeof(x), attributes = attributes(x))
    }
  })
  automatic <- is.character(rows) || identical(as.integer(rows), seq_along(rows))
  plain <- identical(attributes, list(class = "data.frame"))
  if (plain && automatic && all(nulls(kept))) return(NULL)
  kept <- list(attributes = attributes, columns = kept, rows = if (!automatic) rows)
  jsonlite::base64_enc(memCompress(serialize(kept, NULL, version = 3L), "gzip"))
}

pandas_metadata <- function() {
  paste0("{\"index_columns\": [\"", INDEX, "\"], \"column_indexes\": [], \"columns\": [{\"name\": ",
    "null, \"field_name\": \"", INDEX, "\", \"pandas_type\": \"unicode\", \"numpy_type\": ",
    "\"object\", \"metadata\": null}], \"pandas_version\": \"1.5.0\"}")
}

# The first rows, column by column made JSON-safe: what is missing is "", times and the like are
# text.
preview_rows <- function(columns, size) {
  shown <- seq_len(min(size, PREVIEW_ROWS))
  cells <- lapply(unname(columns), function(x) preview_cells(x[shown]))
  as_json(strict(paste0("[", paste(vapply(shown, function(row) {
    paste0("[", paste(vapply(cells, `[[`, "", row), collapse = ", "), "]")
  }, ""), collapse = ", "), "]")))
}

preview_cells <- function(x) {
  missing <- if (is.list(x)) nulls(x) else is.na(x) & !is_nan(x)
  cells <- if (inherits(x, "integer64")) int64_text(x)
    else if (inherits(x, "POSIXct")) json_strings(format(x, usetz = TRUE))
    else if (inherits(x, "difftime")) json_strings(format(x))
    else if (is.list(x)) vapply(x, preview_list, "")
    else if (is.raw(x)) json_atoms(as.integer(x))
    else if (is.object(x)) json_strings(printable(as.character(x)))
    else json_atoms(bare(x))
  ifelse(missing, "\"\"", cells)
}

is_nan <- function(x) if (is.double(x) && !is.object(x)) is.nan(x) else logical(length(x))

preview_list <- function(item) {
  if (is.null(item)) return("\"\"")
  if (is.raw(item)) return(json_strings(paste0("<", length(item), " bytes>")))
  paste0("[", paste(json_atoms(item), collapse = ", "), "]")
}

int64_text <- function(x) {
  if (isNamespaceLoaded("bit64")) return(as.character(bit64::as.character.integer64(x)))
  parts <- int64_parts(x)
  sprintf("%.0f", parts$high * 2^32 + parts$low)
}

read_table <- function(path, name) {
  if (identical(readBin(path, "raw", 1L), charToRaw("{"))) return(read_json_table(path, name))
  table <- (if (table_package() == "arrow") pkg_read else nano_read)(path, name)
  metadata <- table$metadata
  kept <- kept_by_r(metadata)
  vectors <- unname(Map(function(column, label) {
    read_column(column, kept$columns[[label]], paste0("input '", name, "': column '", label, "'"))
  }, table$columns, table$names))
  switch(c(metadata[["strata.arrow.shape"]], "table")[[1]],
    tensor = tensor_of(vectors[[1]], metadata),
    scalar = scalar_of(vectors[[1]], metadata),
    frame_of(vectors, table$names, kept, metadata$pandas)
  )
}

kept_by_r <- function(metadata) {
  if (is.null(metadata[[R_FRAME]])) return(NULL)
  tryCatch(
    unserialize(memDecompress(jsonlite::base64_dec(metadata[[R_FRAME]]), "gzip")),
    error = function(e) NULL
  )
}

# A column as R had it. Another tool may have kept the metadata and changed the column: then the
# column is read as any other.
read_column <- function(column, kept, about) {
  if (is.null(kept)) return(vector_of(column, about))
  if (column$type == "int64" && "integer64" %in% kept$attributes$class) {
    return(structure(column$values, class = kept$attributes$class))
  }
  x <- vector_of(column, about)
  tryCatch(restored(x, kept), error = function(e) x)
}

frame_of <- function(vectors, names, kept, pandas) {
  size <- if (length(vectors)) NROW(vectors[[1]]) else 0L
  frame <- with_row_names(as_frame(vectors, names, size), pandas)
  if (!is.null(kept$rows) && length(kept$rows) == size) attr(frame, "row.names") <- kept$rows
  for (key in names(kept$attributes)) attr(frame, key) <- kept$attributes[[key]]
  frame
}

restored <- function(x, kept) {
  is_kept <- function(class) class %in% kept$attributes$class
  values <- if (is_kept("factor")) {
    codes <- match(as.character(x), kept$attributes$levels)
    stopifnot(is.character(x) || is.factor(x), is.na(codes) == is.na(x))
    codes
  } else if (is_kept("difftime")) {
    if (is.object(x)) bare(x) / DIFFTIME_SECONDS[[kept$attributes$units]] else x
  } else if (is.object(x) && !is.list(x)) {
    stopifnot(inherits(x, kept$attributes$class))
    bare(x)
  } else {
    bare(x)
  }
  stopifnot(is.list(values) == (kept$type == "list"))
  if (kept$type != "list") storage.mode(values) <- kept$type
  attributes(values) <- kept$attributes
  values
}

# An unnamed index of pandas that R can have as row names becomes just that.
with_row_names <- function(frame, pandas) {
  index <- tryCatch(jsonlite::parse_json(pandas)$index_columns, error = function(e) NULL)
  if (!identical(index, list(INDEX)) || !INDEX %in% names(frame)) return(frame)
  rows <- frame[[INDEX]]
  if (is.object(rows) || !typeof(rows) %in% c("character", "integer")) return(frame)
  if (anyNA(rows) || anyDuplicated(rows)) return(frame)
  frame[[INDEX]] <- NULL
  attr(frame, "row.names") <- rows
  frame
}

# NumPy's last index runs fastest, R's first.
tensor_of <- function(values, metadata) {
  if (startsWith(c(metadata[["strata.arrow.tensor.dtype"]], "")[[1]], "complex")) {
    values <- complex(real = every_other(values, 1L), imaginary = every_other(values, 2L))
  }
  shape <- as.integer(unlist(jsonlite::parse_json(metadata[["strata.arrow.tensor.shape"]])))
  if (length(shape) < 2L) return(values)
  values <- values[as.vector(aperm(array(seq_along(values), rev(shape))))]
  dim(values) <- shape
  values
}

scalar_of <- function(value, metadata) {
  type <- c(metadata[["strata.arrow.scalar.type"]], "")[[1]]
  if (type == "complex") return(complex(real = value$real, imaginary = value$imag))
  if (is.list(value) && !is.data.frame(value)) value <- value[[1]]
  if (type != "uuid") return(value)
  hex <- paste(format(as.hexmode(as.integer(value)), width = 2L), collapse = "")
  sub("(.{8})(.{4})(.{4})(.{4})(.{12})", "\\1-\\2-\\3-\\4-\\5", hex)
}

# The table a Python cell writes where Arrow refuses one.
read_json_table <- function(path, name) {
  table <- jsonlite::parse_json(read_text(path))
  stopifnot(isTRUE(table[["__strata_arrow_json_fallback__"]]))
  columns <- lapply(seq_along(table$columns), function(i) as_vector(lapply(table$data, `[[`, i)))
  as_frame(columns, vapply(table$columns, as.character, ""), length(table$data))
}

# --------------------------------------------------------------------------------------------
# The outputs folder
# --------------------------------------------------------------------------------------------

EXTENSIONS <- c(
  "arrow/ipc" = ".arrow", "json/object" = ".json", "application/x-r-rds" = ".rds",
  "image/png" = ".png"
)

in_outputs <- function(file) file.path(run$folder, "outputs", file)

# `X` and `x` stay apart on a disk that folds case.
file_stem <- function(name) {
  if (identical(tolower(name), name)) name else paste0(name, "-", substr(sha256(name), 1L, 8L))
}

# A name such as `../x`, which only backticks can bind, is no file name.
file_name <- function(name, content_type) {
  usable <- is_text(name) && nzchar(name) && !grepl("^[.]|[/\\\\\001-\037]", name)
  if (!usable) stop("a variable named '", printable(name), "' cannot be stored as a file")
  file <- paste0(file_stem(enc2utf8(name)), EXTENSIONS[[content_type]])
  if (nchar(file, "bytes") > 255L) stop("the variable's name is too long to be stored as a file")
  file
}

# Writes a new file with `write`, a function of its path; returns its entry for result.json. A
# link that the cell left under that name is replaced, not followed.
store <- function(name, content_type, write) {
  file <- file_name(name, content_type)
  path <- in_outputs(file)
  unlink(path, recursive = TRUE)
  about <- tryCatch(write(path), error = function(e) {
    unlink(path)
    stop(e)
  })
  c(list(content_type = content_type, file = file, bytes = file.size(path)), about)
}

# --------------------------------------------------------------------------------------------
# Values
# --------------------------------------------------------------------------------------------

store_value <- function(name, value) {
  refuse_handles(value)
  if (is.data.frame(value)) {
    entry <- store_table(name, value)
    if (!is.null(entry)) return(entry)
  } else {
    json <- faithful_json(value)
    if (!is.null(json)) return(store(name, "json/object", function(path) write_json(json, value, path)))
  }
  store(name, "application/x-r-rds", function(path) {
    saveRDS(value, path)
    type <- printable(class_name(value))
    list(type = type, preview = paste0("<", type, " object>"))
  })
}

# NULL for a frame that Arrow cannot give back exactly.
store_table <- function(name, frame) {
  tryCatch(
    store(name, "arrow/ipc", function(path) write_table(frame, path)),
    error = function(e) if (identical(conditionMessage(e), "not Arrow")) NULL else stop(e)
  )
}

# Only what is certain to come back; reading it again is the proof, where that is quick.
CHECKED_CHARS <- 1e6

faithful_json <- function(value) {
  tryCatch({
    json <- json_of(value)
    if (nchar(json) < CHECKED_CHARS && !identical(read_json_text(json), value)) NULL else json
  }, error = function(e) NULL)
}

# The preview travels inside other JSON, through readers with a limit to their depth.
write_json <- function(json, value, path) {
  write_bytes(json, path)
  levels <- depth_of(value)
  preview <- if (levels > 100L) paste0("<list, ", levels, " levels deep>") else as_json(strict(json))
  list(preview = preview)
}

depth_of <- function(value) {
  lists <- if (is.list(value)) value[vapply(value, is.list, NA)]
  if (length(lists)) 1L + max(vapply(lists, depth_of, 0L)) else 1L
}

write_bytes <- function(text, path) {
  connection <- file(path, "wb")
  on.exit(close(connection))
  writeBin(charToRaw(enc2utf8(text)), connection)
}

# saveRDS() writes these as empty shells without a word.
refuse_handles <- function(value) {
  handle <- typeof(value) %in% c("externalptr", "weakref") || inherits(value, "connection") ||
    isS4(value) && any(vapply(attributes(value), typeof, "") == "externalptr")
  if (handle) stop("it lives in this process only (a connection or an external pointer)")
}

stored_or_error <- function(name, value) {
  tryCatch(store_value(name, value), error = function(e) {
    list(error = shortened(message_of(e)), type = printable(class_name(value)))
  })
}

read_input <- function(name, spec) {
  path <- inside(spec$file)
  tryCatch(
    switch(spec$content_type,
      "arrow/ipc" = read_table(path, name),
      "json/object" = read_json(path, name),
      "application/x-r-rds" = readRDS(path),
      "file/path" = , "dir/tar" = path,
      stop(unreadable(spec$content_type))
    ),
    error = function(e) {
      stop("input '", name, "' (", spec$content_type, ") cannot be read: ", message_of(e),
        call. = FALSE)
    }
  )
}

unreadable <- function(content_type) {
  switch(content_type,
    "pickle/object" = , "module/cell-instance" = paste(
      "only Python can unpickle it. Make of it a data frame, numbers, text, or lists and",
      "dicts of them in a Python cell, and use that here"
    ),
    "module/import" = , "module/cell" = paste(
      "a Python module, function or class means nothing to R. Call it in a Python cell, and use",
      "the result here"
    ),
    "R has no reader for this format"
  )
}

inside <- function(path) {
  if (startsWith(path, "/")) path else file.path(run$folder, path)
}

# --------------------------------------------------------------------------------------------
# Plots
# --------------------------------------------------------------------------------------------
# R opens options("device") when something is drawn and no device is open. Ours writes a PNG per
# page, named so that sorting gives the order of drawing.

PLOT_DPI <- 96
PAGE <- "^[.]plot-[0-9]+-[0-9]+[.]png$"

open_plot <- function(width = 800 / PLOT_DPI, height = 600 / PLOT_DPI, ...) {
  if (!isTRUE(capabilities("cairo"))) {
    stop("this R cannot draw without a screen: its png() lacks cairo", call. = FALSE)
  }
  run$devices <- run$devices + 1L
  pattern <- gsub("%", "%%", in_outputs(sprintf(".plot-%05d-", run$devices)), fixed = TRUE)
  open_png(paste0(pattern, "%05d.png"), width, height)
}

open_png <- function(file, width, height) {
  grDevices::png(file, width, height, units = "in", res = PLOT_DPI, type = "cairo")
}

png_size <- function(bytes) {
  readBin(bytes[17:24], "integer", 2L, endian = "big")
}

# plot.new() alone leaves a white page, which shows nothing.
is_blank <- function(bytes) {
  if (length(bytes) > 50000L) return(FALSE)
  size <- png_size(bytes) / PLOT_DPI
  path <- in_outputs(".blank.png")
  on.exit(unlink(path))
  open_png(path, size[[1]], size[[2]])
  graphics::plot.new()
  grDevices::dev.off()
  identical(bytes, readBin(path, "raw", file.size(path)))
}

# The displays of all pages drawn, as files __display__0.png and so on.
finish_plots <- function() {
  tryCatch(grDevices::graphics.off(), error = function(e) NULL)
  pages <- sort(list.files(in_outputs(""), PAGE, all.files = TRUE), method = "radix")
  displays <- list()
  for (page in pages) {
    path <- in_outputs(page)
    bytes <- readBin(path, "raw", file.size(path))
    if (length(bytes) > 24L && !is_blank(bytes)) {
      displays <- c(displays, list(store_plot(bytes, length(displays))))
    }
    unlink(path)
  }
  displays
}

store_plot <- function(bytes, number) {
  size <- png_size(bytes)
  store(paste0("__display__", number), "image/png", function(path) {
    writeBin(bytes, path)
    url <- paste0("data:image/png;base64,", gsub("\n", "", jsonlite::base64_enc(bytes), fixed = TRUE))
    list(inline_data_url = url, width = size[[1]], height = size[[2]], preview = NULL)
  })
}

# --------------------------------------------------------------------------------------------
# The cell
# --------------------------------------------------------------------------------------------

# What the manifest binds before the cell runs: a list of values by name.
bindings <- function(manifest) {
  values <- list()
  for (name in names(manifest$inputs)) {
    values[name] <- list(read_input(name, manifest$inputs[[name]]))
  }
  for (name in names(manifest$tables)) {
    values[name] <- list(manifest$tables[[name]]$uri)
    values[paste0(name, "_snapshot")] <- list(manifest$tables[[name]]$snapshot_id)
  }
  folders <- c(manifest$mounts, manifest$output_dirs)
  for (name in names(folders)) values[[name]] <- normalizePath(inside(folders[[name]]))
  values
}

# quit() would end the process before anything is reported. This one leaves the cell by a
# restart, which, unlike an error, no tryCatch() of the cell catches. It replaces base's own, so
# that packages find it too.
replace_quit <- function() {
  ours <- function(save = "default", status = 0, runLast = TRUE) {
    if (Sys.getpid() != run$pid) run$quit("no", status, FALSE) # a forked child may go
    invokeRestart("strata_quit", status)
  }
  for (name in c("quit", "q")) {
    unlockBinding(name, baseenv())
    assign(name, ours, envir = baseenv())
    lockBinding(name, baseenv())
  }
}

parse_cell <- function(source) {
  lines <- strsplit(gsub("\r\n?", "\n", enc2utf8(source)), "\n", fixed = TRUE)[[1]]
  tryCatch(
    parse(text = lines, srcfile = srcfilecopy("cell", lines), keep.source = TRUE, encoding = "UTF-8"),
    error = function(e) {
      pattern <- "^cell:([0-9]+):([0-9]+): "
      stop(simpleError(sub(pattern, "line \\1, column \\2: ", message_of(e)), quote(parse(cell))))
    }
  )
}

# Evaluates the expressions one by one, as R's own prompt would: visible values are printed, and
# warnings after the expression that raised them. Returns the last one's value and visibility.
evaluate <- function(expressions) {
  last <- list(value = NULL, visible = FALSE)
  starts <- vapply(attr(expressions, "srcref"), function(ref) ref[[1]], 0L)
  for (i in seq_along(expressions)) {
    run$line <- starts[[i]]
    run$depth <- sys.nframe() + 3L # withVisible(), and eval() counts twice
    last <- withVisible(eval(expressions[[i]], globalenv()))
    if (last$visible) {
      run$depth <- sys.nframe() + 3L
      auto_print(last$value)
    }
    print_warnings()
  }
  last
}

# Called from where the cell's own methods are found, by R's own generics.
auto_print <- function(x) {
  room <- list2env(list(x = x, print = base::print, show = methods::show), parent = globalenv())
  eval(if (isS4(x)) quote(show(x)) else quote(print(x)), room)
}

# Warnings wait until R is back at its prompt, or until this internal function, which try() uses
# too, prints them "in addition" to an error.
print_warnings <- function() {
  lines <- character()
  sunk <- sink.number("message")
  collected <- textConnection("lines", "w", local = TRUE)
  sink(collected, type = "message")
  .Internal(printDeferredWarnings())
  tryCatch(sink(getConnection(sunk), type = "message"), error = function(e) sink(type = "message"))
  close(collected)
  if (length(lines)) cat(sub("^In addition: ", "", lines), sep = "\n", file = stderr())
}

# A condition raised by the cell's top level names our eval() as its call, where R's prompt would
# name none.
is_ours <- function(call) {
  !is.null(call) && run$depth <= sys.nframe() && identical(call, sys.call(run$depth))
}

without_our_call <- function(condition) {
  call <- tryCatch(conditionCall(condition), error = function(e) NULL)
  if (is_ours(call)) condition$call <- NULL
  condition
}

on_warning <- function(condition) {
  if (is_ours(conditionCall(condition))) {
    condition$call <- NULL
    warning(condition)
    invokeRestart("muffleWarning")
  }
}

on_error <- function(condition) {
  run$error <- without_our_call(condition)
  run$calls <- cell_calls(utils::head(sys.calls(), -1L))
}

# The cell's own calls out of all that are on the stack, innermost last.
SIGNALLING <- c(
  ".handleSimpleError", ".signalSimpleWarning", "stop", "warning", "signalCondition",
  "doWithOneRestart", "withOneRestart", "withRestarts"
)

cell_calls <- function(calls) {
  if (!run$depth) return(list()) # not in the cell yet
  calls <- calls[-seq_len(min(run$depth, length(calls)))]
  while (length(calls) && is_signalling(calls[[length(calls)]])) calls[[length(calls)]] <- NULL
  calls
}

is_signalling <- function(call) {
  if (is.name(call[[1]])) return(as.character(call[[1]]) %in% SIGNALLING)
  is.function(call[[1]]) && identical(environment(call[[1]]), environment(on_error))
}

# "line 3: f(1)" for each call, outermost first, and the error itself.
traceback_text <- function(error, calls) {
  if (length(calls) > 60L) {
    calls <- c(calls[1:30], list(quote(...)), calls[length(calls) - 29:0])
  }
  shown <- vapply(calls, function(call) {
    line <- call_line(call)
    paste0(if (!is.null(line)) paste0("line ", line, ": "), call_text(call))
  }, "")
  if (length(shown) && !grepl("^line ", shown[[1]]) && !is.null(run$line)) {
    shown[[1]] <- paste0("line ", run$line, ": ", shown[[1]])
  } else if (!length(shown) && !is.null(run$line)) {
    shown <- paste("line", run$line)
  }
  if (length(shown)) shown <- c("Traceback (the cell's calls, outermost first):", paste0("  ", shown))
  lines <- c(shown, error)
  shortened(printable(paste(lines, collapse = "\n")))
}

call_line <- function(call) {
  ref <- attr(call, "srcref")
  if (is.null(ref) || !identical(attr(ref, "srcfile")$filename, "cell")) NULL else ref[[1]]
}

# NULL, or what ended the cell: list(error, traceback). `body` is evaluated in here.
failure_of <- function(body) {
  failed <- function(condition) {
    error <- if (is.null(run$error)) condition else run$error
    text <- error_text(error)
    list(error = text, traceback = traceback_text(text, run$calls))
  }
  ended <- function(text) list(error = text, traceback = traceback_text(text, list()))
  withRestarts(
    tryCatch(
      withCallingHandlers(
        withCallingHandlers({ body; NULL }, warning = on_warning),
        error = on_error
      ),
      error = failed,
      interrupt = function(e) ended("Error: the cell was interrupted")
    ),
    strata_quit = function(status) {
      ended(paste0("Error: the cell ended itself with quit(status = ", call_text(status), ")"))
    },
    abort = function(...) ended("Error: the cell was aborted")
  )
}

# --------------------------------------------------------------------------------------------
# The run
# --------------------------------------------------------------------------------------------

build_env <- function() {
  version <- paste0(R.version$major, ".", sub("[.].*", "", R.version$minor))
  system <- Sys.info()
  paste("r", version, tolower(system[["sysname"]]), system[["machine"]], sep = "-")
}

# After the cell: take back what the harness needs, whatever the cell did to it.
settle <- function() {
  if (Sys.getpid() != run$pid) run$quit("no", 0L, FALSE) # a child that the cell forked
  while (sink.number() > 0L) sink()
  if (sink.number("message") != 2L) sink(type = "message")
  print_warnings()
  options(run$options)
  use_utf8()
  suppressWarnings(Sys.setlocale("LC_NUMERIC", "C"))
  Sys.umask("077")
  setwd(run$folder)
  dir.create(in_outputs(""), showWarnings = FALSE)
}

# The variables that come back: what the cell bound, and what it is known to change.
changed <- function(manifest, before) {
  names <- ls(globalenv())
  again <- intersect(unlist(manifest$mutation_defines), names(manifest$inputs))
  Filter(function(name) {
    !startsWith(name, "_") && (name %in% again || !name %in% names(before) ||
      is_changed(name, before[[name]], manifest$inputs[[name]]))
  }, names)
}

# R copies on change, so a value that still is the same is unchanged. Not so environments, and
# what data.table changes in place: these are compared with what the input's file says.
is_changed <- function(name, before, spec) {
  now <- tryCatch(get(name, envir = globalenv()), error = function(e) NULL)
  if (!identical(now, before)) return(TRUE)
  in_place <- is.environment(now) || is.list(now) && any(vapply(now, is.environment, NA)) ||
    is.data.frame(now) && isNamespaceLoaded("data.table")
  if (!in_place || is.null(spec)) return(FALSE)
  again <- suppressMessages(read_input(name, spec))
  !identical(now, again) && !identical(serialize(now, NULL), serialize(again, NULL))
}

store_variables <- function(names) {
  entries <- list()
  for (name in names) {
    value <- tryCatch(list(get(name, envir = globalenv())), error = function(e) e)
    if (inherits(value, "error")) {
      entries[[name]] <- list(error = message_of(value), type = "promise")
    } else if (!is.function(value[[1]])) {
      entries[[name]] <- stored_or_error(name, value[[1]])
    }
  }
  entries
}

# The last expression's value, where it is a data frame: one more display. A variable that is
# the same frame lends its file.
table_display <- function(last, entries, number) {
  if (!last$visible || !is.data.frame(last$value)) return(NULL)
  for (name in names(entries)) {
    shared <- identical(entries[[name]]$content_type, "arrow/ipc") &&
      identical(get(name, envir = globalenv()), last$value)
    if (shared) return(entries[[name]])
  }
  tryCatch(store_table(paste0("__display__", number), last$value), error = function(e) {
    note("the table is not shown as one: ", message_of(e))
    NULL
  })
}

deletion_warnings <- function(manifest) {
  gone <- Filter(function(name) !exists(name, envir = globalenv(), inherits = FALSE),
    names(manifest$inputs))
  lapply(gone, function(name) {
    message <- paste0("'", name, "' was deleted: the cells after this one still have it")
    list(var_name = name, message = message, suggestion = NULL)
  })
}

report <- function(success, variables = list(), displays = list(), warnings = list(),
                   error = NULL, traceback = NULL) {
  if (length(displays)) variables[["_"]] <- displays[[length(displays)]]
  list(
    success = success, variables = if (length(variables)) variables else no_members(),
    displays = displays, mutation_warnings = warnings, error = error, traceback = traceback,
    build_env = build_env()
  )
}

run_cell <- function(manifest) {
  before <- list()
  last <- NULL
  failure <- failure_of({
    before <- bindings(manifest)
    list2env(before, globalenv())
    expressions <- parse_cell(manifest$source)
    setwd(file.path(run$folder, "work"))
    options(device = open_plot)
    replace_quit()
    last <- evaluate(expressions)
  })
  settle()
  displays <- finish_plots()
  if (!is.null(failure)) {
    return(report(FALSE, displays = displays, error = failure$error, traceback = failure$traceback))
  }
  variables <- store_variables(changed(manifest, before))
  table <- table_display(last, variables, length(displays))
  report(
    TRUE, variables, c(displays, if (!is.null(table)) list(table)), deletion_warnings(manifest)
  )
}

write_result <- function(result) {
  path <- file.path(run$folder, "result.json")
  write_bytes(report_json(result), paste0(path, ".tmp"))
  if (!file.rename(paste0(path, ".tmp"), path)) stop("result.json could not be written")
}

# --------------------------------------------------------------------------------------------
# Main
# --------------------------------------------------------------------------------------------

leave <- function(status, ...) {
  cat(..., sep = "", file = stderr())
  run$quit("no", status, FALSE)
}

read_manifest <- function(path) {
  manifest <- jsonlite::parse_json(read_text(path))
  if (!is.list(manifest) || !is.character(manifest$source)) stop("it has no source")
  manifest
}

main <- function() {
  arguments <- commandArgs(trailingOnly = TRUE)
  if (length(arguments) != 1L) leave(2L, "usage: Rscript harness.R MANIFEST\n")
  use_utf8()
  run$options <- options()
  run$folder <- dirname(normalizePath(arguments, mustWork = FALSE))
  result <- if (!requireNamespace("jsonlite", quietly = TRUE)) {
    text <- "Error: R cells need the R package jsonlite, which is not installed here"
    report(FALSE, error = text, traceback = text)
  } else {
    manifest <- tryCatch(read_manifest(arguments), error = function(e) {
      leave(2L, "the manifest ", arguments, " cannot be used: ", message_of(e), "\n")
    })
    run_cell(manifest)
  }
  tryCatch(write_result(result), error = function(e) leave(1L, message_of(e), "\n"))
  leave(0L)
}

main()
