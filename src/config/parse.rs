//! Values as the environment has them.

use std::time::Duration;

/// An integer as NCCL reads it (`strtoll`, base 0): sign, `0x` for hexadecimal, a leading 0 for octal. Unlike
/// there, anything after the digits is an error and not ignored.
pub fn integer(text: &str) -> Option<i64> {
    let text = text.trim();
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let (radix, digits) = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(rest) => (16, rest),
        None if digits.len() > 1 && digits.starts_with('0') => (8, &digits[1..]),
        None => (10, digits),
    };
    if !digits.starts_with(|c: char| c.is_digit(radix)) {
        return None; // from_str_radix would take a second sign
    }
    let value = i64::from_str_radix(digits, radix).ok()?;
    Some(if negative { -value } else { value })
}

/// An integer between `low` and `high`.
pub fn within<T: TryFrom<i64>>(text: &str, low: i64, high: i64) -> Option<T> {
    let value = integer(text)?;
    (low..=high).contains(&value).then(|| T::try_from(value).ok())?
}

/// An integer between 0 and `high`, or -1 for "not set", as NCCL writes it.
pub fn unless_minus_one(text: &str, high: i64) -> Option<Option<u8>> {
    if integer(text)? == -1 {
        return Some(None);
    }
    within(text, 0, high).map(Some)
}

/// The longest time that may be set.
pub const LONGEST: Duration = Duration::from_secs(86_400);

/// Seconds, fractions allowed, more than none and at most a day.
pub fn seconds(text: &str) -> Option<Duration> {
    let value: f64 = text.trim().parse().ok()?;
    (value > 0.0 && value <= LONGEST.as_secs_f64()).then(|| Duration::try_from_secs_f64(value).ok())?
}
