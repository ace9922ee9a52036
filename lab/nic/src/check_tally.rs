//! Counts of passed, failed and skipped checks.

use std::process::ExitCode;

use anyhow::Result;

/// Numbers of passed, failed and skipped checks. Each check is printed as it ends.
#[derive(Default)]
pub struct CheckTally {
    passed_check_count: usize,
    failed_check_count: usize,
    skipped_check_count: usize,
}

impl CheckTally {
    /// Counts a check, and prints its measured values or the reason for its failure.
    pub fn record_result(&mut self, name: &str, result: Result<String>) {
        match result {
            Ok(measured_text) => {
                self.passed_check_count += 1;
                println!("ok       {name}: {measured_text}");
            }
            Err(error) => {
                self.failed_check_count += 1;
                println!("FAILED   {name}: {error:#}");
            }
        }
    }

    /// Counts and prints a check that cannot be made on this machine.
    pub fn record_skipped(&mut self, name: &str, reason: &str) {
        self.skipped_check_count += 1;
        println!("skipped  {name}: {reason}");
    }

    /// Prints the numbers of checks. Returns a failure status if a check has failed.
    pub fn print_summary(self) -> ExitCode {
        println!(
            "{} passed, {} failed, {} skipped",
            self.passed_check_count, self.failed_check_count, self.skipped_check_count
        );
        if self.failed_check_count == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
