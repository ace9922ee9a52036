//! Checks README and docs against the repository: links and their anchors, `make` targets, commands with their flags.
//! An error names the file of each mistake.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use clap::CommandFactory as _;
use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, Options, Parser, Tag, TagEnd};

use crate::Cli;

/// Checked parts of a document.
#[derive(Debug, Default)]
struct Document {
    /// Destinations of links, as written.
    links: Vec<String>,
    /// Anchors that GitHub derives from the headings.
    anchors: BTreeSet<String>,
    /// Code spans, and single lines of code blocks.
    code: Vec<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Returns README.md and all files of docs/, each with its path relative to the repository's root.
fn documents() -> BTreeMap<PathBuf, Document> {
    let root = root();
    let docs = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let files = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let files = files.chain([root.join("README.md")]);
    files
        .map(|path| {
            let text = std::fs::read_to_string(&path).unwrap();
            (path.strip_prefix(&root).unwrap().to_owned(), parse(&text))
        })
        .collect()
}

fn parse(text: &str) -> Document {
    let mut document = Document::default();
    let mut heading: Option<String> = None;
    let mut block = false;
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                document.links.push(dest_url.into_string());
            }
            Event::Start(Tag::Heading { level: HeadingLevel::H1 | HeadingLevel::H2 | HeadingLevel::H3, .. }) => {
                heading = Some(String::new());
            }
            Event::End(TagEnd::Heading(_)) => {
                if let Some(heading) = heading.take() {
                    document.add_anchor(&heading);
                }
            }
            // Blocks of other languages contain no commands.
            Event::Start(Tag::CodeBlock(kind)) => {
                block = match kind {
                    CodeBlockKind::Indented => true,
                    CodeBlockKind::Fenced(language) => language.is_empty() || language.starts_with("sh"),
                };
            }
            Event::End(TagEnd::CodeBlock) => block = false,
            Event::Text(text) => {
                if let Some(heading) = &mut heading {
                    *heading += &text;
                }
                if block {
                    document.code.extend(text.lines().map(str::to_owned));
                }
            }
            Event::Code(text) => {
                if let Some(heading) = &mut heading {
                    *heading += &text;
                }
                document.code.push(text.into_string());
            }
            _ => {}
        }
    }
    document
}

impl Document {
    fn add_anchor(&mut self, heading: &str) {
        let kept = heading.trim().to_lowercase();
        let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let slug: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let numbered = (1..).map(|number| format!("{slug}-{number}"));
        let free = std::iter::once(slug.clone()).chain(numbered).find(|slug| !self.anchors.contains(slug));
        self.anchors.extend(free);
    }
}

/// Returns the reason why a link in the file `document_path` is broken; `None` for a valid or external link.
fn broken_link_reason(link: &str, document: &Path, all: &BTreeMap<PathBuf, Document>) -> Option<String> {
    // External links would need network access.
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let target = match file {
        "" => document.to_owned(),
        file => document.parent().unwrap_or(Path::new("")).join(file),
    };
    let Ok(found) = root().join(&target).canonicalize() else {
        return Some(format!("{link}: there is no {}", target.display()));
    };
    let anchor = anchor?;
    let target = all.get(found.strip_prefix(root()).ok()?);
    let known = target.is_some_and(|target| target.anchors.contains(anchor));
    (!known).then(|| format!("{link}: no heading has the anchor #{anchor}"))
}

/// Returns the arguments of every command in a line of code that runs `program`, up to a shell operator.
fn commands<'a>(line: &'a str, program: &'a str) -> impl Iterator<Item = Vec<&'a str>> {
    let line = line.split_once(" #").map_or(line, |(command, _)| command);
    let parts = line.split(['|', ';', '&', '(', ')', '>']);
    parts.filter_map(move |part| {
        let mut words = part.split_whitespace().skip_while(|word| matches!(*word, "$" | "sudo" | "exec")).peekable();
        (words.next()? == program).then(|| words.map(|word| word.trim_matches(['`', '"', '\''])).collect())
    })
}

/// Returns an error for the first sub-command or flag that does not exist. Brackets mark optional ones: `[--fix]`.
fn unknown_word(words: &[&str], of: &clap::Command) -> Option<String> {
    let mut command = of.clone();
    command.build();
    let (mut command, mut words) = (&command, words.iter().copied().peekable());
    while let Some(next) = words.peek().and_then(|word| command.find_subcommand(word)) {
        command = next;
        words.next();
    }
    let name = command.get_name();
    let is_placeholder = |word: &str| word.starts_with(|c: char| c.is_uppercase() || "<[.-*…".contains(c));
    if let Some(word) = words.peek().filter(|word| command.has_subcommands() && !is_placeholder(word)) {
        return Some(format!("`{name}` has no sub-command `{word}`"));
    }
    let flags = words.filter_map(|word| word.trim_start_matches('[').strip_prefix("--"));
    let flags =
        flags.map(|flag| flag.split(['=', ']', ',', '.']).next().unwrap_or(flag)).filter(|flag| !flag.is_empty());
    let known = |flag: &str| {
        matches!(flag, "help" | "version") || command.get_arguments().any(|argument| argument.get_long() == Some(flag))
    };
    flags.filter(|flag| !known(flag)).map(|flag| format!("`{name}` has no flag `--{flag}`")).next()
}

/// Returns an error message for each command in a line that has an unknown sub-command or flag.
fn unknown_of<'a>(line: &'a str, of: &'a clap::Command) -> impl Iterator<Item = String> {
    commands(line, of.get_name()).filter_map(|words| unknown_word(&words, of))
}

fn assert_none(mistakes: Vec<String>) {
    assert!(mistakes.is_empty(), "\n{}", mistakes.join("\n"));
}

#[test]
fn every_link_has_a_target() {
    let all = documents();
    let mistakes = all.iter().flat_map(|(path, document)| {
        let broken = document.links.iter().filter_map(|link| broken_link_reason(link, path, &all));
        broken.map(|why| format!("{}: {why}", path.display()))
    });
    assert_none(mistakes.collect());
}

#[test]
fn every_page_is_in_the_index() {
    let all = documents();
    let index = &all[Path::new("docs/README.md")];
    let missing = all.keys().filter(|path| path.starts_with("docs") && !path.ends_with("README.md"));
    let missing = missing.filter(|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        !index.links.iter().any(|link| link == name)
    });
    assert_none(missing.map(|path| format!("docs/README.md does not name {}", path.display())).collect());
}

#[test]
fn every_command_exists_with_its_flags() {
    let all = [coreward::command(), Cli::command()];
    let mistakes = documents().into_iter().flat_map(|(path, document)| {
        let mistakes: Vec<String> = document
            .code
            .iter()
            .flat_map(|line| all.iter().flat_map(|of| unknown_of(line, of)))
            .map(|why| format!("{}: {why}", path.display()))
            .collect();
        mistakes
    });
    assert_none(mistakes.collect());
}

#[test]
fn every_make_target_exists() {
    let makefile = std::fs::read_to_string(root().join("Makefile")).unwrap();
    let targets: BTreeSet<&str> = makefile.lines().filter_map(|line| Some(line.split_once(": ")?.0)).collect();
    let mistakes = documents().into_iter().flat_map(|(path, document)| {
        let named: Vec<String> = document
            .code
            .iter()
            .flat_map(|line| commands(line, "make").filter_map(|words| Some((*words.first()?).to_owned())))
            .collect();
        named.into_iter().map(move |target| (path.clone(), target))
    });
    let mistakes = mistakes.filter(|(_, target)| !targets.contains(target.as_str()));
    assert_none(mistakes.map(|(path, target)| format!("{}: no target {target:?}", path.display())).collect());
}

/// Returns the words of `text` that start with `prefix`.
fn words<'a>(text: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(move |word| word.starts_with(prefix))
}

#[test]
fn every_event_is_explained() {
    let manual = std::fs::read_to_string(root().join("docs/api.md")).unwrap();
    let section = manual.split("\n## ").find(|section| section.starts_with("Events\n")).unwrap();
    let rows: Vec<&str> = section.lines().filter_map(|line| line.strip_prefix("* `")?.split('`').next()).collect();
    let known: Vec<&str> = coreward_api::types::EventId::ALL.into_iter().map(|event| event.name()).collect();
    assert_eq!(rows, known);
}

/// Checks that numbers in the documents equal the program's constants.
#[test]
fn numbers_are_those_of_the_constants() {
    use coreward_fleet::audit;
    use coreward_wire::ServiceIndex;

    let thousands = |number: usize| match number {
        0..1000 => number.to_string(),
        _ => format!("{},{:03}", number / 1000, number % 1000),
    };
    let services = thousands(ServiceIndex::COUNT);
    let servers = thousands(coreward_model::ServerId::COUNT);
    let of_server = coreward_intf::MAX_SERVICES_OF_SERVER;
    let owners = coreward_model::connection_table::OwnerNumber::all().count();
    let megabytes = coreward_http::endpoints::MAX_DOCUMENT_BYTES >> 20;
    let kilobytes = coreward_http::endpoints::DEFAULT_MAX_BODY_BYTES >> 10;
    let entries = thousands(audit::MAX_ENTRIES);
    for (page, text) in [
        ("config.md", format!("`[[service]]`, at most {services}:")),
        ("limits.md", format!("* **{services} services, {servers} server ids of the whole fleet**:")),
        ("limits.md", format!("* **{of_server} services on one server**:")),
        ("limits.md", format!("* **Load balancers with a connection table**: {owners} in a fleet;")),
        ("api.md", format!("a body of more than {kilobytes} KiB (documents: {megabytes} MiB)")),
        ("api.md", format!("the newest {entries} changes")),
    ] {
        let manual = std::fs::read_to_string(root().join("docs").join(page)).unwrap();
        assert!(manual.contains(&text), "docs/{page} does not contain {text:?}");
    }
}

#[test]
fn dashboard_reads_existing_counters() {
    let script = std::fs::read_to_string(root().join("crates/control-server/src/api/dashboard/dashboard.js")).unwrap();
    let counters: Vec<&str> = script.split("per(last.").skip(1).filter_map(|rest| rest.split(' ').next()).collect();
    assert!(!counters.is_empty());
    let unknown = counters.iter().filter(|name| !coreward_intf::LB_COUNTER_NAMES.contains(name));
    assert_none(unknown.map(|name| format!("dashboard.js reads the counter {name}, which does not exist")).collect());
}

#[test]
fn every_alert_is_explained_and_uses_known_metrics() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let (rules, operations, metrics) =
        (read("contrib/prometheus/coreward.rules.yml"), read("docs/operations.md"), read("docs/metrics.md"));
    let alerts: Vec<&str> = words(&rules, "Coreward").collect();
    assert!(alerts.len() > 5, "{alerts:?}");
    let unexplained = alerts.iter().filter(|alert| !operations.contains(&format!("* `{alert}`: ")));
    assert_none(unexplained.map(|alert| format!("docs/operations.md does not explain {alert}")).collect());
    let gone = words(&operations, "Coreward").filter(|alert| !alerts.contains(alert));
    assert_none(gone.map(|alert| format!("docs/operations.md: there is no alert {alert}")).collect());
    let unknown = words(&rules, "coreward_").filter(|name| !metrics.contains(&format!("* `{name}` (")));
    assert_none(unknown.map(|name| format!("an alert asks for {name}, which docs/metrics.md does not have")).collect());
    let reasons: Vec<&str> = rules
        .split("coreward_lb_drops_total{reason=")
        .skip(1)
        .filter_map(|rest| rest.split('"').nth(1))
        .flat_map(|matched| matched.split('|'))
        .collect();
    assert!(reasons.len() > 2, "{reasons:?}");
    let unknown =
        reasons.iter().filter(|reason| !coreward_intf::LB_COUNTER_NAMES.contains(&&*format!("drop_{reason}")));
    assert_none(unknown.map(|reason| format!("an alert asks for drops by {reason}, which does not exist")).collect());
}

#[test]
fn mistakes_of_documents_are_detected() {
    let document =
        parse("# One `two`, three\n\n## One\n\n# One\n\n[a](b.md#c)\n\n`coreward status`\n\n    make x   # y\n");
    assert_eq!(document.anchors.iter().map(String::as_str).collect::<Vec<_>>(), ["one", "one-1", "one-two-three"]);
    assert_eq!(
        (document.links, document.code),
        (vec!["b.md#c".into()], vec!["two".into(), "coreward status".into(), "make x   # y".into()])
    );
    let all = documents();
    let why = |link| broken_link_reason(link, Path::new("docs/config.md"), &all);
    assert_eq!(why("nowhere.md").unwrap(), "nowhere.md: there is no docs/nowhere.md");
    assert_eq!(why("../README.md#nothing").unwrap(), "../README.md#nothing: no heading has the anchor #nothing");
    assert_eq!((why("../README.md"), why("https://example.org/x")), (None, None));
    let coreward = coreward::command();
    let says = |line| unknown_of(line, &coreward).next();
    assert_eq!(says("sudo coreward stauts").unwrap(), "`coreward` has no sub-command `stauts`");
    assert_eq!(says("true && coreward keys rotate --farce").unwrap(), "`rotate` has no flag `--farce`");
    assert_eq!(says("coreward doctor --config FILE [--fix] --config=x | head --no-such"), None);
}
