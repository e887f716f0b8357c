//! Reading only the changed files gives the same result as reading everything.

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

/// A change below the directory.
#[derive(Debug, Clone)]
enum Act {
    Write(&'static str, usize),
    Rename(&'static str, &'static str),
    Remove(&'static str),
    MakeDirectory(&'static str),
    /// A link of the first name to the second.
    Link(&'static str, &'static str),
    HardLink(&'static str, &'static str),
}

const NAMES: [&str; 9] =
    ["a.yaml", "b.yml", "c.json", "d", "d/a.yaml", "d/b.yaml", ".hidden", ".hidden/a.yaml", "notes.txt"];

/// Objects that conflict by name, files that fail, and files without objects.
const TEXTS: [&str; 8] = [
    "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {\"name\": \"one\"}}",
    "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {\"name\": \"one\", \"labels\": {\"a\": \"b\"}}}",
    "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {\"name\": \"two\"}}",
    "{\"apiVersion\": \"v1\", \"kind\": \"Namespace\", \"metadata\": {\"name\": \"one\", \"labels\": {\"a\": \"b\"}}}",
    "{\"apiVersion\": \"k8s.cni.cncf.io/v1\", \"kind\": \"NetworkAttachmentDefinition\", \"metadata\": {\"name\": \"one\"}}",
    "{\"apiVersion\": \"networking.k8s.io/v1\", \"kind\": \"NetworkPolicy\", \"metadata\": {\"name\": \"one\"}, \"spec\": {\"podSelector\": {}}}",
    "{\"kind\": \"Pod\"",
    "",
];

fn any_act() -> impl Strategy<Value = Act> {
    let name = || prop::sample::select(NAMES.to_vec());
    prop_oneof![
        4 => (name(), 0..TEXTS.len()).prop_map(|(name, text)| Act::Write(name, text)),
        2 => (name(), name()).prop_map(|(from, to)| Act::Rename(from, to)),
        2 => name().prop_map(Act::Remove),
        1 => name().prop_map(Act::MakeDirectory),
        1 => (name(), name()).prop_map(|(link, target)| Act::Link(link, target)),
    ]
}

/// The changes between two passes. A rename of a file is alone: one that is gone again at the next pass could not be
/// attributed.
fn any_round() -> impl Strategy<Value = Vec<Act>> {
    let name = || prop::sample::select(NAMES.to_vec());
    prop_oneof![
        6 => prop::collection::vec(any_act(), 1..4),
        1 => (name(), name()).prop_map(|(link, target)| vec![Act::HardLink(link, target)]),
    ]
}

/// The name that the kernel uses: directories on the way may be links.
fn real(root: &Path, name: &str) -> Option<PathBuf> {
    let path = root.join(name);
    let directory = fs::canonicalize(path.parent()?).ok()?;
    let directory = directory.strip_prefix(fs::canonicalize(root).ok()?).ok()?.to_owned();
    Some(directory.join(path.file_name()?))
}

/// Carries out the change, if possible, and returns the names that the kernel reports.
fn done(root: &Path, act: &Act) -> BTreeSet<PathBuf> {
    let path = |name: &str| root.join(name);
    let told = |names: &[&str]| names.iter().filter_map(|name| real(root, name)).collect::<BTreeSet<_>>();
    let (told, done) = match act {
        Act::Write(name, text) => {
            // A write through a link is reported under the link's target.
            let target = match fs::canonicalize(path(name)) {
                Ok(target) => target.strip_prefix(fs::canonicalize(root).unwrap()).ok().map(Path::to_owned),
                Err(_) if path(name).is_symlink() => None,
                Err(_) => real(root, name),
            };
            let Some(target) = target else { return BTreeSet::new() };
            let done = fs::write(root.join(&target), TEXTS[*text]);
            (BTreeSet::from([target]), done)
        }
        Act::Rename(from, to) => (told(&[from, to]), fs::rename(path(from), path(to))),
        Act::Remove(name) if path(name).is_dir() && !path(name).is_symlink() => {
            (told(&[name]), fs::remove_dir_all(path(name)))
        }
        Act::Remove(name) => (told(&[name]), fs::remove_file(path(name))),
        Act::MakeDirectory(name) => (told(&[name]), fs::create_dir(path(name))),
        Act::Link(link, target) => (told(&[link]), std::os::unix::fs::symlink(path(target), path(link))),
        Act::HardLink(link, target) => (told(&[link]), fs::hard_link(path(target), path(link))),
    };
    if done.is_ok() { told } else { BTreeSet::new() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn what_was_touched_is_all_that_has_to_be_read(
        rounds in prop::collection::vec(any_round(), 1..12),
    ) {
        let directory = TempDir::new().unwrap();
        let (mut some, mut all) = (Tree::new(directory.path().into()), Tree::new(directory.path().into()));
        some.read(&Touched::Anything).unwrap();
        all.read(&Touched::Anything).unwrap();
        for acts in rounds {
            let touched: BTreeSet<PathBuf> =
                acts.iter().flat_map(|act| done(directory.path(), act)).collect();
            some.read(&Touched::Names(touched)).unwrap();
            all.read(&Touched::Anything).unwrap();
            prop_assert_eq!(some.objects(), all.objects(), "after {:?}", acts);
        }
    }
}

/// Keys of the objects, and problems, of a file with this text that contained a pod before.
fn given(name: &str, text: &str) -> (Vec<String>, Vec<String>) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join(name);
    fs::write(&path, "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {\"name\": \"before\"}}")
        .unwrap();
    let Read::Now(before) = read_file(&path, None) else { panic!("not read") };
    fs::write(&path, text).unwrap();
    let Read::Now(now) = read_file(&path, Some(&before)) else { panic!("not read") };
    let keys = now.objects.iter().map(|(_, object)| object.key().to_string());
    (keys.collect(), now.problems.into_iter().map(|problem| problem.message).collect())
}

const PODS: [&str; 2] = ["pod default/before", "pod default/one"];

#[test]
fn a_manifest_of_all_bytes_that_there_may_be_is_read_and_one_more_is_not() {
    let most = budget::MANIFEST.most;
    let [before, one] = PODS.map(|pod| vec![pod.to_owned()]);
    for name in ["a.json", "a.yaml"] {
        let padded = |bytes: usize| bounded::padded(TEXTS[0], bytes);
        assert_eq!(given(name, &padded(most)), (one.clone(), vec![]), "{name}");
        let refused = vec![format!("read file: longer than {most} bytes")];
        assert_eq!(given(name, &padded(most + 1)), (before.clone(), refused), "{name}");
    }
}

#[test]
fn a_manifest_of_all_objects_that_there_may_be_is_read_and_of_one_more_nothing_is() {
    let most = budget::OBJECTS.most;
    let namespace = |number| {
        format!(r#"{{"apiVersion": "v1", "kind": "Namespace", "metadata": {{"name": "n{number}"}}}}"#)
    };
    let items = |count: usize| (0..count).map(namespace).collect::<Vec<_>>();
    let list =
        |count| format!(r#"{{"apiVersion": "v1", "kind": "List", "items": [{}]}}"#, items(count).join(","));
    let documents = |count| items(count).join("\n---\n");
    let texts = |count| items(count).join("\n");
    let kinds: [(&str, &dyn Fn(usize) -> String); 4] =
        [("a.json", &list), ("a.yaml", &list), ("a.yaml", &documents), ("a.json", &texts)];
    for (name, text) in kinds {
        let (keys, problems) = given(name, &text(most));
        let all: BTreeSet<String> = (0..most).map(|number| format!("namespace n{number}")).collect();
        assert_eq!((keys.into_iter().collect(), problems), (all, vec![]), "{name}");
        let refused = budget::OBJECTS.check(most + 1).unwrap_err().to_string();
        assert_eq!(given(name, &text(most + 1)), (vec![PODS[0].to_owned()], vec![refused]), "{name}");
    }
}
