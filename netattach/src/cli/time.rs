//! Formats times for people and programs.

const MS_OF_DAY: u64 = 24 * 60 * 60 * 1000;

/// Formats a time in milliseconds since 1970 as RFC 3339, in UTC: `2026-01-31T12:00:00.123Z`.
pub(super) fn rfc3339(time_ms: u64) -> String {
    let (year, month, day) = date(time_ms / MS_OF_DAY);
    let ms = time_ms % MS_OF_DAY;
    let (seconds, ms) = (ms / 1000, ms % 1000);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
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
        }
    }
}
