//! Checks that README.md and docs/ agree with the repository: links with their anchors, `make` targets, and commands
//! with their flags. The error message lists each mistake with its file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use clap::CommandFactory as _;
use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, Options, Parser, Tag, TagEnd};

use crate::LabCli;

/// Parts of a Markdown document that are checked.
#[derive(Debug, Default)]
struct CheckedDocument {
    /// Destinations of the document's links, as written.
    link_destinations: Vec<String>,
    /// Anchors that GitHub derives from the headings.
    heading_anchors: BTreeSet<String>,
    /// Code spans, and single lines of code blocks.
    code_snippets: Vec<String>,
}

fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Returns README.md and all files of docs/, each with its path relative to the repository's root.
fn read_documents() -> BTreeMap<PathBuf, CheckedDocument> {
    let repository_root = repository_root();
    let doc_paths = std::fs::read_dir(repository_root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let markdown_paths = doc_paths.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let markdown_paths = markdown_paths.chain([repository_root.join("README.md")]);
    markdown_paths
        .map(|path| {
            let text = std::fs::read_to_string(&path).unwrap();
            (path.strip_prefix(&repository_root).unwrap().to_owned(), parse_markdown(&text))
        })
        .collect()
}

fn parse_markdown(text: &str) -> CheckedDocument {
    let mut document = CheckedDocument::default();
    let mut open_heading: Option<String> = None;
    let mut is_in_shell_block = false;
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        if let (Event::Text(text) | Event::Code(text), Some(heading)) = (&event, &mut open_heading) {
            heading.push_str(text);
        }
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                document.link_destinations.push(dest_url.into_string());
            }
            Event::Start(Tag::Heading { level: HeadingLevel::H1 | HeadingLevel::H2 | HeadingLevel::H3, .. }) => {
                open_heading = Some(String::new());
            }
            Event::End(TagEnd::Heading(_)) => {
                if let Some(heading) = open_heading.take() {
                    document.add_heading_anchor(&heading);
                }
            }
            // Blocks of other languages contain no commands.
            Event::Start(Tag::CodeBlock(kind)) => {
                is_in_shell_block = match kind {
                    CodeBlockKind::Indented => true,
                    CodeBlockKind::Fenced(language) => language.is_empty() || language.starts_with("sh"),
                };
            }
            Event::End(TagEnd::CodeBlock) => is_in_shell_block = false,
            Event::Text(text) if is_in_shell_block => {
                document.code_snippets.extend(text.lines().map(str::to_owned));
            }
            Event::Code(text) => document.code_snippets.push(text.into_string()),
            _ => {}
        }
    }
    document
}

impl CheckedDocument {
    fn add_heading_anchor(&mut self, heading: &str) {
        let lowercase_heading = heading.trim().to_lowercase();
        let slug_chars = lowercase_heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let slug: String = slug_chars.map(|c| if c == ' ' { '-' } else { c }).collect();
        let numbered_slugs = (1..).map(|number| format!("{slug}-{number}"));
        let unused_slug =
            std::iter::once(slug.clone()).chain(numbered_slugs).find(|slug| !self.heading_anchors.contains(slug));
        self.heading_anchors.extend(unused_slug);
    }
}

/// Returns the reason why a link in the file `document_path` is broken, or `None` for a valid or external link.
fn broken_link_reason(
    link: &str,
    document_path: &Path,
    all_documents: &BTreeMap<PathBuf, CheckedDocument>,
) -> Option<String> {
    // External links are not checked, because that would need network access.
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let target_path = match file {
        "" => document_path.to_owned(),
        file => document_path.parent().unwrap_or(Path::new("")).join(file),
    };
    let Ok(canonical_path) = repository_root().join(&target_path).canonicalize() else {
        return Some(format!("{link}: there is no {}", target_path.display()));
    };
    let anchor = anchor?;
    let target_document = all_documents.get(canonical_path.strip_prefix(repository_root()).ok()?);
    let anchor_exists = target_document.is_some_and(|target| target.heading_anchors.contains(anchor));
    (!anchor_exists).then(|| format!("{link}: no heading has the anchor #{anchor}"))
}

/// Returns the arguments of each call of `program` in a line of shell code. A shell operator ends the arguments.
fn arguments_of_program_calls<'a>(line: &'a str, program: &'a str) -> impl Iterator<Item = Vec<&'a str>> {
    let code = line.split_once(" #").map_or(line, |(command, _)| command);
    let simple_commands = code.split(['|', ';', '&', '(', ')', '>']);
    simple_commands.filter_map(move |simple_command| {
        let mut command_words =
            simple_command.split_whitespace().skip_while(|word| matches!(*word, "$" | "sudo" | "exec")).peekable();
        (command_words.next()? == program)
            .then(|| command_words.map(|word| word.trim_matches(['`', '"', '\''])).collect())
    })
}

/// Returns an error for the first sub-command or flag that `program` does not have. Optional arguments may be in
/// brackets, as in `[--fix]`.
fn unknown_argument_error(arguments: &[&str], program: &clap::Command) -> Option<String> {
    let mut command = program.clone();
    command.build();
    let (mut command, mut remaining_arguments) = (&command, arguments.iter().copied().peekable());
    while let Some(subcommand) = remaining_arguments.peek().and_then(|argument| command.find_subcommand(argument)) {
        command = subcommand;
        remaining_arguments.next();
    }
    let command_name = command.get_name();
    let is_placeholder = |argument: &str| argument.starts_with(|c: char| c.is_uppercase() || "<[.-*…".contains(c));
    if let Some(argument) = remaining_arguments.peek().filter(|word| command.has_subcommands() && !is_placeholder(word))
    {
        return Some(format!("`{command_name}` has no sub-command `{argument}`"));
    }
    let flags = remaining_arguments.filter_map(|argument| argument.trim_start_matches('[').strip_prefix("--"));
    let flags =
        flags.map(|flag| flag.split(['=', ']', ',', '.']).next().unwrap_or(flag)).filter(|flag| !flag.is_empty());
    let is_known_flag = |flag: &str| {
        matches!(flag, "help" | "version") || command.get_arguments().any(|argument| argument.get_long() == Some(flag))
    };
    flags.filter(|flag| !is_known_flag(flag)).map(|flag| format!("`{command_name}` has no flag `--{flag}`")).next()
}

/// Returns an error message for each call of `program` in a line that has an unknown sub-command or flag.
fn unknown_argument_errors<'a>(line: &'a str, program: &'a clap::Command) -> impl Iterator<Item = String> {
    arguments_of_program_calls(line, program.get_name())
        .filter_map(|arguments| unknown_argument_error(&arguments, program))
}

fn assert_no_mistakes(mistakes: Vec<String>) {
    assert!(mistakes.is_empty(), "\n{}", mistakes.join("\n"));
}

#[test]
fn every_link_in_the_documents_has_a_target() {
    let all_documents = read_documents();
    let mistakes = all_documents.iter().flat_map(|(path, document)| {
        let broken_link_reasons =
            document.link_destinations.iter().filter_map(|link| broken_link_reason(link, path, &all_documents));
        broken_link_reasons.map(|reason| format!("{}: {reason}", path.display()))
    });
    assert_no_mistakes(mistakes.collect());
}

#[test]
fn every_docs_page_is_linked_in_the_index() {
    let all_documents = read_documents();
    let index_page = &all_documents[Path::new("docs/README.md")];
    let doc_paths = all_documents.keys().filter(|path| path.starts_with("docs") && !path.ends_with("README.md"));
    let unlinked_paths = doc_paths.filter(|path| {
        let file_name = path.file_name().unwrap().to_str().unwrap();
        !index_page.link_destinations.iter().any(|link| link == file_name)
    });
    assert_no_mistakes(unlinked_paths.map(|path| format!("docs/README.md does not name {}", path.display())).collect());
}

#[test]
fn commands_in_the_documents_exist_with_their_flags() {
    let programs = [coreward::command_definition(), LabCli::command()];
    let mistakes = read_documents().into_iter().flat_map(|(path, document)| {
        let mistakes: Vec<String> = document
            .code_snippets
            .iter()
            .flat_map(|line| programs.iter().flat_map(|program| unknown_argument_errors(line, program)))
            .map(|reason| format!("{}: {reason}", path.display()))
            .collect();
        mistakes
    });
    assert_no_mistakes(mistakes.collect());
}

#[test]
fn make_targets_in_the_documents_exist() {
    let makefile = std::fs::read_to_string(repository_root().join("Makefile")).unwrap();
    let existing_targets: BTreeSet<&str> = makefile.lines().filter_map(|line| Some(line.split_once(": ")?.0)).collect();
    let mistakes = read_documents().into_iter().flat_map(|(path, document)| {
        let mentioned_targets: Vec<String> = document
            .code_snippets
            .iter()
            .flat_map(|line| {
                arguments_of_program_calls(line, "make").filter_map(|arguments| Some((*arguments.first()?).to_owned()))
            })
            .collect();
        mentioned_targets.into_iter().map(move |target| (path.clone(), target))
    });
    let missing_targets = mistakes.filter(|(_, target)| !existing_targets.contains(target.as_str()));
    assert_no_mistakes(
        missing_targets.map(|(path, target)| format!("{}: no target {target:?}", path.display())).collect(),
    );
}

fn words_with_prefix<'a>(text: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(move |word| word.starts_with(prefix))
}

#[test]
fn every_event_is_explained_in_the_api_manual() {
    let api_manual = std::fs::read_to_string(repository_root().join("docs/api.md")).unwrap();
    let events_section = api_manual.split("\n## ").find(|section| section.starts_with("Events\n")).unwrap();
    let explained_events: Vec<&str> =
        events_section.lines().filter_map(|line| line.strip_prefix("* `")?.split('`').next()).collect();
    let existing_events: Vec<&str> = coreward_api::types::EventId::ALL.into_iter().map(|event| event.name()).collect();
    assert_eq!(explained_events, existing_events);
}

#[test]
fn numbers_in_the_documents_equal_the_constants() {
    use coreward_fleet::audit;
    use coreward_wire::ServiceIndex;

    let with_thousands_separator = |number: usize| match number {
        0..1000 => number.to_string(),
        _ => format!("{},{:03}", number / 1000, number % 1000),
    };
    let max_services = with_thousands_separator(ServiceIndex::COUNT);
    let max_servers = with_thousands_separator(coreward_model::ServerId::COUNT);
    let max_services_of_server = coreward_intf::MAX_SERVICES_OF_SERVER;
    let max_owners = coreward_model::connection_table::TableOwnerNumber::all().count();
    let max_document_mib = coreward_http::endpoints::MAX_FLEET_DOCUMENT_BYTES >> 20;
    let max_body_kib = coreward_http::endpoints::DEFAULT_MAX_REQUEST_BODY_BYTES >> 10;
    let max_audit_entries = with_thousands_separator(audit::MAX_AUDIT_ENTRIES);
    for (page, text) in [
        ("config.md", format!("`[[service]]`, at most {max_services}:")),
        ("limits.md", format!("* **{max_services} services, {max_servers} server ids of the whole fleet**:")),
        ("limits.md", format!("* **{max_services_of_server} services on one server**:")),
        ("limits.md", format!("* **Load balancers with a connection table**: {max_owners} in a fleet;")),
        ("api.md", format!("a body of more than {max_body_kib} KiB (documents: {max_document_mib} MiB)")),
        ("api.md", format!("the newest {max_audit_entries} changes")),
    ] {
        let page_text = std::fs::read_to_string(repository_root().join("docs").join(page)).unwrap();
        assert!(page_text.contains(&text), "docs/{page} does not contain {text:?}");
    }
}

#[test]
fn dashboard_reads_existing_counters() {
    let dashboard_script =
        std::fs::read_to_string(repository_root().join("crates/control-server/src/api/dashboard/dashboard.js"))
            .unwrap();
    let counter_names: Vec<&str> = dashboard_script
        .split("per(last.")
        .skip(1)
        .filter_map(|text_after_prefix| text_after_prefix.split(' ').next())
        .collect();
    assert!(!counter_names.is_empty());
    let unknown_counters = counter_names.iter().filter(|name| !coreward_intf::LB_COUNTER_NAMES.contains(name));
    assert_no_mistakes(
        unknown_counters.map(|name| format!("dashboard.js reads the counter {name}, which does not exist")).collect(),
    );
}

#[test]
fn every_alert_is_explained_and_uses_known_metrics() {
    let read_file = |path: &str| std::fs::read_to_string(repository_root().join(path)).unwrap();
    let (rules, operations, metrics) = (
        read_file("contrib/prometheus/coreward.rules.yml"),
        read_file("docs/operations.md"),
        read_file("docs/metrics.md"),
    );
    let alert_names: Vec<&str> = words_with_prefix(&rules, "Coreward").collect();
    assert!(alert_names.len() > 5, "{alert_names:?}");
    let unexplained_alerts = alert_names.iter().filter(|alert| !operations.contains(&format!("* `{alert}`: ")));
    assert_no_mistakes(
        unexplained_alerts.map(|alert| format!("docs/operations.md does not explain {alert}")).collect(),
    );
    let removed_alerts = words_with_prefix(&operations, "Coreward").filter(|alert| !alert_names.contains(alert));
    assert_no_mistakes(removed_alerts.map(|alert| format!("docs/operations.md: there is no alert {alert}")).collect());
    let unknown_metrics =
        words_with_prefix(&rules, "coreward_").filter(|name| !metrics.contains(&format!("* `{name}` (")));
    assert_no_mistakes(
        unknown_metrics.map(|name| format!("an alert asks for {name}, which docs/metrics.md does not have")).collect(),
    );
    let drop_reasons: Vec<&str> = rules
        .split("coreward_lb_drops_total{reason=")
        .skip(1)
        .filter_map(|text_after_label| text_after_label.split('"').nth(1))
        .flat_map(|reason_pattern| reason_pattern.split('|'))
        .collect();
    assert!(drop_reasons.len() > 2, "{drop_reasons:?}");
    let unknown_reasons =
        drop_reasons.iter().filter(|reason| !coreward_intf::LB_COUNTER_NAMES.contains(&&*format!("drop_{reason}")));
    assert_no_mistakes(
        unknown_reasons.map(|reason| format!("an alert asks for drops by {reason}, which does not exist")).collect(),
    );
}

#[test]
fn mistakes_in_documents_are_detected() {
    let document = parse_markdown(
        "# One `two`, three\n\n## One\n\n# One\n\n[a](b.md#c)\n\n`coreward status`\n\n    make x   # y\n",
    );
    assert_eq!(
        document.heading_anchors.iter().map(String::as_str).collect::<Vec<_>>(),
        ["one", "one-1", "one-two-three"]
    );
    assert_eq!(
        (document.link_destinations, document.code_snippets),
        (vec!["b.md#c".into()], vec!["two".into(), "coreward status".into(), "make x   # y".into()])
    );
    let all_documents = read_documents();
    let find_broken_link_reason = |link| broken_link_reason(link, Path::new("docs/config.md"), &all_documents);
    assert_eq!(find_broken_link_reason("nowhere.md").unwrap(), "nowhere.md: there is no docs/nowhere.md");
    assert_eq!(
        find_broken_link_reason("../README.md#nothing").unwrap(),
        "../README.md#nothing: no heading has the anchor #nothing"
    );
    assert_eq!(
        (find_broken_link_reason("../README.md"), find_broken_link_reason("https://example.org/x")),
        (None, None)
    );
    let coreward_command = coreward::command_definition();
    let first_argument_error = |line| unknown_argument_errors(line, &coreward_command).next();
    assert_eq!(first_argument_error("sudo coreward stauts").unwrap(), "`coreward` has no sub-command `stauts`");
    assert_eq!(first_argument_error("true && coreward keys rotate --farce").unwrap(), "`rotate` has no flag `--farce`");
    assert_eq!(first_argument_error("coreward doctor --config FILE [--fix] --config=x | head --no-such"), None);
}
