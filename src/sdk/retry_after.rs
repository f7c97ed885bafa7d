//! `Retry-After`. Nothing but the standard library, so that the fuzzer can be given this file as it is.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
/// The mean length of a year, in seconds.
const YEAR: u64 = 31_556_952;

/// The wait that a `Retry-After` asks for, in seconds or until a date (RFC 9110, sections 10.2.3 and 5.6.7). A date
/// that has passed is no wait.
pub(super) fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // More than can be counted is longer than any deadline.
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
    }
    let this_year = now.duration_since(UNIX_EPOCH).map_or(1970, |since| 1970 + since.as_secs() / YEAR);
    let at = UNIX_EPOCH.checked_add(Duration::from_secs(http_date(value, this_year)?))?;
    Some(at.duration_since(now).unwrap_or_default())
}

/// The seconds since 1970 of a date in one of the three forms that recipients must read. What day of the week it
/// is said to be does not matter.
fn http_date(value: &str, this_year: u64) -> Option<u64> {
    let (date, time) = match value.split_once(", ") {
        Some((_, rest)) => {
            let rest = rest.strip_suffix(" GMT")?;
            match rest.split_once('-') {
                // `Sunday, 06-Nov-94 08:49:37 GMT`
                Some((day, rest)) => {
                    let (month, rest) = rest.split_once('-')?;
                    let (year, time) = rest.split_once(' ')?;
                    (
                        (
                            two_digits(year).map(|year| of_two_digits(year, this_year))?,
                            month,
                            two_digits(day)?,
                        ),
                        time,
                    )
                }
                // `Sun, 06 Nov 1994 08:49:37 GMT`, the one form that servers may write.
                None => {
                    let mut parts = rest.splitn(4, ' ');
                    let (day, month) = (parts.next()?, parts.next()?);
                    ((digits(parts.next()?, 4)?, month, two_digits(day)?), parts.next()?)
                }
            }
        }
        // `Sun Nov  6 08:49:37 1994`
        None => {
            let mut parts = value.splitn(3, ' ').skip(1);
            let (month, rest) = (parts.next()?, parts.next()?);
            let (day, rest) = rest.split_at_checked(2)?;
            let day = day.strip_prefix(' ').map_or_else(|| two_digits(day), |day| digits(day, 1))?;
            let (time, year) = rest.strip_prefix(' ')?.split_once(' ')?;
            ((digits(year, 4)?, month, day), time)
        }
    };
    let (year, month, day) = date;
    let month = MONTHS.iter().position(|name| *name == month)? as u64 + 1;
    let mut time = time.split(':').map(two_digits);
    let (hour, minute, second) = (time.next()??, time.next()??, time.next()??);
    let is_sane = (1..=31).contains(&day) && year >= 1970 && hour <= 23 && minute <= 59 && second <= 60;
    if !is_sane || time.next().is_some() {
        return None;
    }
    // Days since 1970, by years that begin in March.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = y * 365 + y / 4 - y / 100 + y / 400 + (m * 153 + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?;
    Some(days * 86_400 + hour * 3_600 + minute * 60 + second)
}

/// The year that a year of two digits stands for: the last one that is not more than 50 years from now.
fn of_two_digits(year: u64, this_year: u64) -> u64 {
    let last = this_year + 50;
    last - (last % 100 + 100 - year) % 100
}

fn two_digits(text: &str) -> Option<u64> {
    digits(text, 2)
}

/// A number of so many digits and nothing else.
fn digits(text: &str, count: usize) -> Option<u64> {
    let is_number = text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When the RFC's examples are.
    const THEN: u64 = 784_111_777;

    #[test]
    fn retry_after_is_read_in_seconds_and_as_a_date() {
        let now = UNIX_EPOCH + Duration::from_secs(THEN);
        let read = |value| retry_after(value, now);
        assert_eq!(read("7"), Some(Duration::from_secs(7)));
        assert_eq!(read(" 0 "), Some(Duration::ZERO));
        assert_eq!(read("99999999999999999999999"), Some(Duration::from_secs(u64::MAX)));
        assert_eq!(read("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::ZERO));
        assert_eq!(read("Sun, 06 Nov 1994 08:50:07 GMT"), Some(Duration::from_secs(30)));
        assert_eq!(read("Sun, 06 Nov 1994 08:00:00 GMT"), Some(Duration::ZERO));
        for odd in [
            "",
            "-1",
            "+1",
            "1.5",
            "soon",
            "Sun, 06 Nov 1994 08:49:37 CET",
            "Sun, 06 Nov 1994 08:49 GMT",
            "Sun, 06",
            "Sun, 40 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 0001 08:49:37 GMT",
            "Sun, 06 Nov 1994 25:49:37 GMT",
            "Sun, 06 Nov 1994 08:+9:37 GMT",
            "Sunday, 06-Nov-1994 08:49:37 GMT",
            "Sunday, 06-Nov-94 08:49:37",
            "Sunday, 06-Nov-ü 08:49:37 GMT",
            "Sun Nov 6 08:49:37 1994",
            "Sun Nov  6 08:49:37 94",
            "Sun Nov ü8 08:49:37 1994",
        ] {
            assert_eq!(read(odd), None, "{odd}");
        }
        assert_eq!(http_date("Tue, 29 Feb 2000 00:00:00 GMT", 2000), Some(951_782_400));
        assert_eq!(http_date("Thu, 01 Jan 1970 00:00:00 GMT", 2000), Some(0));
    }

    #[test]
    fn the_two_old_forms_of_a_date_are_read_too() {
        for date in [
            "Sun, 06 Nov 1994 08:49:37 GMT",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994",
            "Sun Nov 06 08:49:37 1994",
        ] {
            assert_eq!(http_date(date, 1994), Some(THEN), "{date}");
            assert_eq!(http_date(date, 2026), Some(THEN), "{date}");
        }
        assert_eq!(http_date("Sun Nov 16 08:49:37 1994", 1994), Some(THEN + 864_000));
    }

    #[test]
    fn a_year_of_two_digits_is_the_last_one_that_is_not_more_than_fifty_years_away() {
        for (year, this_year, meant) in [
            (94, 1994, 1994),
            (5, 1999, 2005),
            (44, 1994, 2044),
            (45, 1994, 1945),
            (76, 2026, 2076),
            (77, 2026, 1977),
        ] {
            assert_eq!(of_two_digits(year, this_year), meant, "{year} in {this_year}");
        }
    }
}
