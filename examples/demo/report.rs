//! What a person sees of the flights: a line while each is under way, then a table, then the counts.

use std::{io::Write, time::Instant};

use goaround::{BoxError, Outcome};

use crate::flight::{Counts, Landed};

/// One call in the table.
#[derive(PartialEq)]
pub(crate) struct Row {
    effect: &'static str,
    happened: String,
    attempts: usize,
    outcome: &'static str,
    effects: Option<usize>,
}

impl Row {
    pub(crate) fn of(
        effect: &'static str,
        happened: &str,
        attempts: usize,
        outcome: Option<Outcome>,
        effects: Option<usize>,
    ) -> Self {
        let outcome = match outcome {
            None if effects.is_some() => "done",
            None => "answer",
            Some(Outcome::NotDone) => "not done",
            Some(Outcome::NoAnswer) => "no answer",
            Some(Outcome::Unknown) => "UNKNOWN",
            Some(Outcome::DoneResultLost) => "done, result lost",
            Some(Outcome::Answered) => "server's error",
            Some(_) => "?",
        };
        Self { effect, happened: happened.to_owned(), attempts, outcome, effects }
    }
}

/// Where the flights are noted.
pub(crate) struct Board {
    planned: usize,
    lines: Vec<String>,
    errors: Vec<String>,
    failed: usize,
    counts: Counts,
}

impl Board {
    pub(crate) fn new(planned: usize) -> Self {
        let lines = Vec::new();
        Self { planned, lines, errors: Vec::new(), failed: 0, counts: Counts::default() }
    }

    /// Awaits a flight and notes how it went.
    pub(crate) async fn fly(
        &mut self,
        title: &'static str,
        flight: impl Future<Output = Result<Landed, BoxError>>,
    ) {
        let number = self.counts.flights + 1;
        print!("flight {number:2} of {}: {title} ... ", self.planned);
        let _ = std::io::stdout().flush();
        let start = Instant::now();
        let landed = flight.await;
        let took = start.elapsed().as_secs_f32();
        let wrong = match landed {
            Ok(landed) => {
                self.counts.add(&landed);
                self.note(number, title, &landed);
                landed.wrong
            }
            Err(error) => {
                self.counts.flights += 1;
                vec![error.to_string()]
            }
        };
        if wrong.is_empty() {
            return println!("ok, {took:.2} s");
        }
        println!("FAILED, {took:.2} s");
        self.failed += 1;
        self.lines.push(format!("{number:2}  {title}: FAILED"));
        for wrong in wrong {
            println!("    {wrong}");
            self.lines.push(format!("    {wrong}"));
        }
    }

    fn note(&mut self, number: usize, title: &str, landed: &Landed) {
        let mut title = format!("{number:2}  {title}");
        // Calls that went alike share a line.
        for rows in landed.rows.chunk_by(Row::eq) {
            let Row { effect, happened, attempts, outcome, effects } = &rows[0];
            let effect = match rows.len() {
                1 => (*effect).to_owned(),
                n => format!("{n} {effect}s"),
            };
            let attempts = attempts.to_string();
            let effects = effects.map_or("-".to_owned(), |effects| effects.to_string());
            self.lines.push(line([&title, &effect, happened, &attempts, outcome, &effects]));
            title.clear();
        }
        let errors = landed.errors.iter().map(|error| format!("{number:2}  {error}"));
        self.errors.extend(errors);
    }

    /// Prints all of it. `true` if all flights came out as they must.
    pub(crate) fn close(self, json: bool) -> Result<bool, BoxError> {
        let header = ["    call", "effect", "what happened", "attempts", "outcome", "effects at the server"];
        println!("\n{}", line(header));
        self.lines.iter().for_each(|line| println!("{line}"));
        println!("\nThe errors, as their callers see them:");
        self.errors.iter().for_each(|error| println!("{error}"));

        let Counts { flights, reconnects, duplicates, lost, unknown, unknown_reported } = self.counts;
        println!(
            "\n{flights} flights, {} failed; {reconnects} reconnects; {duplicates} duplicates, {lost} lost, \
             {unknown} unknown, {unknown_reported} of them reported",
            self.failed
        );
        if json {
            println!("{}", serde_json::to_string(&self.counts)?);
        }
        Ok(self.failed == 0 && self.counts.are_good())
    }
}

/// A line of the table.
fn line([call, effect, happened, attempts, outcome, effects]: [&str; 6]) -> String {
    format!("{call:<41}  {effect:<7}  {happened:<39}  {attempts:>8}  {outcome:<14}  {effects}")
}
