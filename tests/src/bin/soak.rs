//! `soak --minutes N [--seed S] [--attachments N]`: pods are created and deleted at random on two nodes, see
//! `netattach_tests::soak`. Needs root.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use netattach_tests::soak::{self, Options};

fn main() -> ExitCode {
    match options().and_then(|options| soak::run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("soak failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn options() -> Result<Options> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut options = Options {
        time: Duration::from_secs(120),
        seed: u64::from(now.subsec_nanos()) ^ now.as_secs(),
        batches: None,
        attachments: 0,
        logs: PathBuf::from("target/soak"),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().with_context(|| format!("{word} needs a value"))?;
        let number = || value.parse::<u64>().with_context(|| format!("{word} {value}: not a number"));
        match word.as_str() {
            "--minutes" => options.time = Duration::from_secs(number()? * 60),
            "--seed" => options.seed = number()?,
            "--batches" => options.batches = Some(usize::try_from(number()?)?),
            "--attachments" => options.attachments = u32::try_from(number()?)?,
            "--logs" => options.logs = PathBuf::from(value),
            _ => bail!("{word} is none of --minutes N, --seed S, --batches N, --attachments N, --logs DIR"),
        }
    }
    Ok(options)
}
