//! Formats times for people and programs.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MS_OF_DAY: u64 = 24 * 60 * 60 * 1000;

/// Formats a time in milliseconds since 1970 as RFC 3339, in UTC: `2026-01-31T12:00:00.123Z`.
pub(super) fn rfc3339(time_ms: u64) -> String {
    let (year, month, day) = date(time_ms / MS_OF_DAY);
    let ms = time_ms % MS_OF_DAY;
    let (seconds, ms) = (ms / 1000, ms % 1000);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

/// The time now, in milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Reads `2026-01-31T12:00:00Z`, with or without a fraction of the second, in UTC: milliseconds since 1970.
pub(super) fn from_rfc3339(text: &str) -> Option<u64> {
    let (date_text, clock) = text.strip_suffix('Z')?.split_once('T')?;
    let number = |text: &str, digits: usize| {
        let is_number = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| text.parse::<u64>().ok()).flatten()
    };
    let mut parts = date_text.splitn(3, '-');
    let (year, month, day) =
        (number(parts.next()?, 4)?, number(parts.next()?, 2)?, number(parts.next()?, 2)?);
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
    let mut parts = clock.splitn(3, ':');
    let (hour, minute, second) =
        (number(parts.next()?, 2)?, number(parts.next()?, 2)?, number(parts.next()?, 2)?);
    let fraction = number(fraction, fraction.len()).filter(|_| (1..=9).contains(&fraction.len()))? * 1000
        / 10u64.pow(fraction.len() as u32);
    if hour > 23 || minute > 59 || second > 59 || year < 1970 {
        return None;
    }
    // The days are few enough to be counted: only `date` knows the calendar.
    let least = (year - 1970) * 365;
    let days = (least..least + 3000).find(|days| date(*days) == (year, month, day))?;
    Some(days * MS_OF_DAY + ((hour * 60 + minute) * 60 + second) * 1000 + fraction)
}

/// Reads `30s`, `5m`, `2h`, `500ms`.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a duration as 500ms, 30s, 5m or 2h");
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
    let unit = match &text[digits..] {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wrong()),
    };
    number.checked_mul(unit).map(Duration::from_millis).ok_or_else(wrong)
}

/// The Gregorian date that many days after 1970-01-01: year, month, day.
fn date(mut days: u64) -> (u64, u64, u64) {
    const DAYS_OF_400_YEARS: u64 = 146_097;
    let mut year = 1970 + days / DAYS_OF_400_YEARS * 400;
    days %= DAYS_OF_400_YEARS;
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let days_of = |year| if is_leap(year) { 366 } else { 365 };
    while days >= days_of(year) {
        days -= days_of(year);
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_date_and_zone() {
        let cases = [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199_999, "2024-02-29T23:59:59.999Z"),
            (1_735_689_599_123, "2024-12-31T23:59:59.123Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
            (13_574_476_800_000, "2400-02-28T00:00:00.000Z"),
        ];
        for (time_ms, expected) in cases {
            assert_eq!(rfc3339(time_ms), expected);
            assert_eq!(from_rfc3339(expected), Some(time_ms));
        }
    }

    #[test]
    fn times_and_durations_are_read_and_nothing_else_is() {
        assert_eq!(from_rfc3339("2024-02-29T23:59:59Z"), Some(1_709_251_199_000));
        assert_eq!(from_rfc3339("2024-02-29T23:59:59.5Z"), Some(1_709_251_199_500));
        for text in [
            "",
            "Z",
            "T",
            "TZ",
            "2023-02-29T00:00:00Z",
            "2024-02-29T24:00:00Z",
            "2024-02-29T00:00:00",
            "2024-2-9T00:00:00Z",
            "2024-02-29T00:00:00.Z",
            "1969-12-31T00:00:00Z",
            "2024-02-29 00:00:00Z",
            "2024-13-01T00:00:00Z",
        ] {
            assert_eq!(from_rfc3339(text), None, "{text}");
        }
        let ms = |text| duration(text).map(|it| it.as_millis());
        assert_eq!(
            ["500ms", "30s", "5m", "2h", "0s"].map(ms),
            [Ok(500), Ok(30_000), Ok(300_000), Ok(7_200_000), Ok(0)]
        );
        for text in
            ["", "s", "5", "5 s", "-5s", "5d", "99999999999999999999s", "18446744073709551615h", "5µs"]
        {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
