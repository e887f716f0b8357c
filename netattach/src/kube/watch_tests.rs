//! When a watch is given up.

use super::super::test_server::{self, Answer};
use super::*;

#[test]
fn a_watch_is_given_up_after_its_time_or_after_silence_if_that_is_sooner() {
    let seconds = Duration::from_secs;
    for (asked, whole, least, silence) in [
        (1, 6_000, 500, 6_000),
        (60, 65_000, 1_000, 65_000),
        (90, 95_000, 1_000, 95_000),
        (240, 245_000, 1_000, 90_000),
    ] {
        let times = Times::of(seconds(asked));
        let found = [times.whole, times.least, times.silence].map(|time| time.as_millis());
        assert_eq!(found, [whole, least, silence], "{asked} s");
    }
}

#[tokio::test]
async fn a_watch_that_was_silent_for_too_long_ends_as_if_the_server_had_ended_it() {
    let line = "{\"type\": \"BOOKMARK\", \"object\": {}}\n";
    let client = test_server::client(move |_| Answer { code: 200, body: line.to_owned(), ends: None }).await;
    let ask = Ask::get("/api/v1/pods?watch=true");
    let ms = Duration::from_millis;
    for (whole, silence, ends) in [(60_000, 100, Some(())), (100, 60_000, None), (100, 100, None)] {
        let body = client.send(&ask).await.unwrap().into_body();
        let (mut lived, mut events) = (0, 0);
        let times = Times { whole: ms(whole), least: ms(20), silence: ms(silence) };
        let ended = read(&ask, body, times, || lived += 1, |_| events += 1).await;
        assert_eq!((lived, events), (1, 1));
        match ended {
            Ok(()) => assert_eq!(ends, Some(())),
            Err(Broken::Off(RequestError::Late { within, .. })) => {
                assert_eq!((ends, within), (None, ms(whole)))
            }
            Err(other) => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_a_server_refuses_for_good_is_the_position_and_what_passes_is_not() {
    let broken = |code: u16, is_of_future: bool| {
        let refusal = Refusal { code, message: String::new(), retry_after: None, is_of_future };
        Broken::Off(Ask::get("/p").refused(refusal))
    };
    let table = [
        (400, false, true),
        (401, false, false),
        (403, false, false),
        (404, false, true),
        (410, false, true),
        (422, false, true),
        (429, false, false),
        (500, false, false),
        (503, false, false),
        (504, false, false),
        (504, true, true),
    ];
    let found = table.map(|(code, future, _)| (code, future, broken(code, future).denies_position()));
    assert_eq!(found, table);
    assert!(!Broken::Off(Ask::get("/p").ended()).denies_position());
}
